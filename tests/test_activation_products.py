"""transformers' architectures whose products of activations are no plain attention, or stand in forwards that cannot be
recorded: relative positions, blocks of a long sequence, state spaces, attention that returns its weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.test_architectures import SPECIAL, build, encoder
from tests.test_transformers import SMALL, WORDS, check_exactness

transformers = pytest.importorskip("transformers")

LONG_T5 = {"vocab_size": 250, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
LONG_T5 |= {"local_radius": 5, "decoder_start_token_id": 0}
GLOBAL = {"encoder_attention_type": "transient-global", "global_block_size": 4}
XLNET = {"vocab_size": 250, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}
FUNNEL = {"vocab_size": 250, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "block_sizes": [2, 2]}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 8}
STATES = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 4}
AXES = {"axial_pos_shape": [4, 8], "axial_pos_embds_dim": [32, 32], "max_position_embeddings": 32}
REFORMER = {"attn_layers": ["local", "local"], "local_attn_chunk_length": 8, "feed_forward_size": 128, **AXES}
SOUND_LAYERS = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16}
WAVLM = {**SMALL, **SOUND_LAYERS, "num_conv_pos_embedding_groups": 4, "num_buckets": 32, "max_bucket_distance": 80}
WEIGHTS = {"output_attentions": True}

PAIR = {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :5]}
SAMPLES = {"input_values": torch.linspace(-90, 90, 4000).sin().reshape(2, 2000)}

MODELS: dict[str, tuple[Callable[[], Any], dict[str, torch.Tensor]]] = {
    "xlnet": (build("XLNet", "Model", **XLNET), {"input_ids": WORDS}),
    "funnel": (build("Funnel", "Model", **FUNNEL), {"input_ids": WORDS}),
    "mamba 2": (build("Mamba2", "Model", **SPECIAL, **MAMBA, n_groups=2, expand=2), {"input_ids": WORDS}),
    "falcon mamba": (build("FalconMamba", "Model", **SPECIAL, **STATES), {"input_ids": WORDS}),
    "reformer": (
        build("Reformer", "Model", **SPECIAL, **REFORMER, hidden_size=64, num_attention_heads=4, is_decoder=False),
        {"input_ids": torch.arange(64).reshape(2, 32) * 7 % 250},
    ),
    "long t5": (build("LongT5", "Model", **LONG_T5), PAIR),
    "long t5, global": (build("LongT5", "Model", **LONG_T5, **GLOBAL), PAIR),
    "bloom": (build("Bloom", "Model", **SPECIAL, hidden_size=64, n_layer=2, n_head=4, **WEIGHTS), {"input_ids": WORDS}),
    "roformer": (encoder("RoFormer", **WEIGHTS), {"input_ids": WORDS}),
    "bert": (encoder("Bert", attn_implementation="eager", **WEIGHTS), {"input_ids": WORDS}),
    "wavlm": (build("WavLM", "Model", **WAVLM), SAMPLES),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_no_less_exact_than_torch_and_nearly_all_on_xopt(name: str, dtype: torch.dtype) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = make().eval()
    check_exactness(source, inputs, "last_hidden_state", dtype)
