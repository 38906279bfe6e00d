"""More of transformers' architectures, none of which the package knows by name: as exact as torch, nearly all on xopt.

Beside that each has to show what of its blocks is fused, since a model whose forwards ran as they are would be exact.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xopt
from tests.test_transformers import DECODER, PIXELS, SMALL, WORDS, check_exactness

transformers = pytest.importorskip("transformers")

SPECIAL = {"vocab_size": 250, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}


def build(name: str, kind: str, **sizes: Any) -> Callable[[], Any]:
    """The model of a name, as ForCausalLM or Model, from its configuration."""

    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**sizes)
        return getattr(transformers, name + kind)(config)

    return make


def language(name: str, **sizes: Any) -> Callable[[], Any]:
    return build(name, "ForCausalLM", **{**SPECIAL, **SMALL, **sizes})


def encoder(name: str, **sizes: Any) -> Callable[[], Any]:
    return build(name, "Model", **{**SPECIAL, **SMALL, **sizes})


def vision(name: str, **sizes: Any) -> Callable[[], Any]:
    return build(name, "Model", **{"image_size": 32, "patch_size": 8, **SMALL, **sizes})


def both(name: str, **sizes: Any) -> Callable[[], Any]:
    return build(name, "Model", **{**SPECIAL, **DECODER, **HEADS, **sizes})


KEYS = {"num_key_value_heads": 2}
ROTARY = {"rotary", "attention"}
GATED = {*ROTARY, "merged linear"}
FALCON = {*ROTARY, "layer_norm", "linear+gelu_erf", "linear+add"}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
SCALED = {"merged linear", "attention", "linear+gelu_erf", "linear+layer_scale+add"}

LANGUAGE: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "gpt-j": (language("GPTJ", rotary_dim=8, **GPT), {"rotary", "merged linear", "linear+gelu_tanh"}),
    "phi": (language("Phi"), {*GATED, "linear+gelu_tanh"}),
    "phi 3": (language("Phi3", **KEYS), {*ROTARY, "gated halves (silu)"}),
    "stablelm": (language("StableLm", **KEYS), {*GATED, "gated linear (silu)"}),
    "glm": (language("Glm", **GROUPED), {*GATED, "gated halves (silu)"}),
    "cohere": (language("Cohere", **KEYS), {*GATED, "gated linear (silu)"}),
    "qwen 2": (language("Qwen2", **KEYS), {*GATED, "linear+add+rms_norm", "gated linear (silu)"}),
    "qwen 3": (language("Qwen3", **GROUPED), {*GATED, "rms_norm", "gated linear (silu)"}),
    "mistral": (language("Mistral", sliding_window=8, **GROUPED), {*GATED, "gated linear (silu)"}),
    "gemma": (language("Gemma", **GROUPED), {*GATED, "gated linear (gelu_tanh)"}),
    "mpt": (language("Mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=64), {"layer_norm", "linear+gelu_erf"}),
    "nemotron": (language("Nemotron", head_dim=16, **KEYS), {*GATED, "linear+add+layer_norm"}),
    "falcon": (language("Falcon", alibi=False, new_decoder_architecture=True, num_kv_heads=2), FALCON),
    "gemma 2": (language("Gemma2", sliding_window=8, **GROUPED), {"rotary", "rms_norm", "gated linear (gelu_tanh)"}),
    "olmo 2": (language("Olmo2", **KEYS), {*ROTARY, "rms_norm", "gated linear (silu)"}),
    "deepseek 3": (
        language("DeepseekV3", first_k_dense_replace=2, **LATENT),
        {"attention", "merged linear", "linear+add+rms_norm", "gated linear (silu)"},
    ),
    "opt": (language("OPT", ffn_dim=128, max_position_embeddings=64, word_embed_proj_dim=64), {"attention"}),
}
ENCODERS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "electra": (encoder("Electra", embedding_size=32), {"attention", "linear+gelu_erf", "linear+add+layer_norm"}),
    "albert": (encoder("Albert", embedding_size=32), {"attention", "linear+gelu_tanh"}),
    "mpnet": (encoder("MPNet"), {"attention", "merged linear", "linear+add+layer_norm"}),
    "deberta 2": (encoder("DebertaV2", **RELATIVE), {"attention", "linear+add+layer_norm"}),
    "deberta": (encoder("Deberta", **RELATIVE), {"attention", "merged linear", "linear+gelu_erf"}),
    "modernbert": (encoder("ModernBert", global_attn_every_n_layers=2, local_attention=8), {"attention"}),
    "esm": (encoder("Esm", mask_token_id=3, position_embedding_type="rotary"), ROTARY),
}
IMAGES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "dinov2": (vision("Dinov2"), SCALED),
    "dinov3": (vision("DINOv3ViT"), SCALED),
    "beit": (vision("Beit", use_relative_position_bias=True), SCALED),
}
PAIRS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "mbart": (both("MBart"), {"attention", "merged linear", "linear+add+layer_norm"}),
    "marian": (both("Marian", decoder_start_token_id=0), {"attention", "merged linear", "linear+add+layer_norm"}),
}
CASES = {
    **{name: (*case, {"input_ids": WORDS}, "logits") for name, case in LANGUAGE.items()},
    **{name: (*case, {"input_ids": WORDS}, "last_hidden_state") for name, case in ENCODERS.items()},
    **{name: (*case, {"pixel_values": PIXELS}, "last_hidden_state") for name, case in IMAGES.items()},
    **{
        name: (*case, {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :5]}, "last_hidden_state")
        for name, case in PAIRS.items()
    },
}


def calls_torchscript(name: str) -> bool:
    """As DeBERTa's attention does in some versions of transformers: nobody sees into a function that torch.jit.script
    has made, so the layers that call it run as they are, with packed weights."""
    modules = {"deberta": "deberta.modeling_deberta", "deberta 2": "deberta_v2.modeling_deberta_v2"}
    if name not in modules:
        return False
    values = vars(importlib.import_module(f"transformers.models.{modules[name]}")).values()
    return any(isinstance(value, torch.jit.ScriptFunction) for value in values)


@pytest.mark.parametrize("name", CASES)
def test_no_less_exact_than_torch_and_fused(name: str) -> None:
    make, expected, inputs, output = CASES[name]
    if calls_torchscript(name):
        expected = expected - {"attention", "merged linear"}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = make().eval()
    for dtype in (torch.float32, torch.bfloat16):
        optimized = check_exactness(source, inputs, output, dtype)
        fused = {step for fusion in xopt.report(optimized).fusions for step in fusion.fused}
        assert expected <= fused, f"{dtype}: {sorted(expected - fused)} missing in {sorted(fused)}"
