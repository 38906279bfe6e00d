"""transformers' attention: under the name that models ask for, and for optimized models alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xopt
from xopt.modules.block import PROGRAMS

transformers = pytest.importorskip("transformers")

WORDS = torch.arange(32).reshape(2, 16) * 7 % 240 + 5
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(vocab_size=250, **SMALL)).eval()


def that_attends_to_chosen_keys() -> Any:
    """Its attention puts into the mask what an indexer chose, if its implementation is called "eager" or "sdpa"."""
    sizes = SMALL | {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "max_position_embeddings": 128}
    heads = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    indexer = {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 32}
    dense = {"first_k_dense_replace": 2, "mlp_layer_types": ["dense"] * 2, "moe_intermediate_size": 32}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.DeepseekV32Config(vocab_size=250, **sizes, **heads, **indexer, **dense, **ends)
    torch.manual_seed(0)
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(5)
    return model


@torch.no_grad()
def test_models_that_ask_for_their_attention_by_name() -> None:
    source = that_attends_to_chosen_keys()
    optimized = xopt.optimize(source, dtype=torch.float32)
    for words in (WORDS[:, :8], WORDS, WORDS):
        torch.testing.assert_close(optimized(words).logits, source(words).logits, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(optimized.generate(WORDS, **options), source.generate(WORDS, **options))


def fused(model: Any) -> set[str]:
    return {name for part in model.modules() if PROGRAMS in vars(part) for name in vars(part)[PROGRAMS].fused}


@torch.no_grad()
def test_it_is_for_those_that_were_optimized_so() -> None:
    source = bert()
    expected = source(WORDS).last_hidden_state
    optimized = xopt.optimize(source, dtype=torch.float32)
    without = xopt.optimize(source, dtype=torch.float32, config=xopt.Config(fuse_attention=False))
    for model in (optimized, without):
        assert model.config._attn_implementation == "sdpa"
        torch.testing.assert_close(model(WORDS).last_hidden_state, expected)
    assert "attention" in fused(optimized)
    assert "attention" not in fused(without)
    assert torch.equal(source(WORDS).last_hidden_state, expected)


@torch.no_grad()
def test_models_inside_keep_theirs() -> None:
    """A choice for the whole is none for its parts, whose weights of attention somebody may want to see."""
    small = {**SMALL, "vocab_size": 250}
    encoder, decoder = transformers.BertConfig(**small), transformers.BertConfig(**small)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    source = transformers.EncoderDecoderModel(config=config).eval()
    source.set_attn_implementation({"encoder": "eager", "decoder": "sdpa"})
    optimized = xopt.optimize(source, dtype=torch.float32)
    assert optimized.encoder.config._attn_implementation == "eager"
    assert optimized.decoder.config._attn_implementation == "sdpa"
    seen = optimized.encoder(WORDS, output_attentions=True).attentions
    torch.testing.assert_close(seen, source.encoder(WORDS, output_attentions=True).attentions)


@torch.no_grad()
def test_a_function_that_was_registered_before_stays() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def halved(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return sdpa_attention_forward(*args, **kwargs)[0] / 2, None

    before = transformers.AttentionInterface()["sdpa"]
    transformers.AttentionInterface.register("sdpa", halved)
    try:
        source = bert()
        optimized = xopt.optimize(source, dtype=torch.float32)
        torch.testing.assert_close(optimized(WORDS).last_hidden_state, source(WORDS).last_hidden_state)
    finally:
        transformers.AttentionInterface.register("sdpa", before)
