"""Steps of language models with a cache of keys and values: the whole model is one program, in which caches grow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import xopt

SMALL: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64},
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=4),
    "qwen": lambda: transformers.Qwen2Config(**SMALL),
    "gemma": lambda: transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=4),
    "phi": lambda: transformers.PhiConfig(**{**SMALL, "num_key_value_heads": 4}),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def steps_of(model: Any, words: Tensor, mask: Tensor | None, given: bool) -> list[Tensor]:
    """The logits of a prompt, of single words after it, and of two at once. `given`: the caller makes the cache."""
    cache: Any = transformers.DynamicCache(config=model.config) if given else None
    logits = []
    begin = 0
    with torch.no_grad():
        for end in (5, 6, 7, 8, 10, 11, 12):
            seen = None if mask is None else mask[:, :end]
            result = model(words[:, begin:end], attention_mask=seen, past_key_values=cache, use_cache=True)
            logits.append(result.logits)
            cache, begin = result.past_key_values, end
    assert cache.get_seq_length() == words.shape[1] or type(model.config).__name__.startswith(("Mistral", "Gemma"))
    return logits


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("given", [False, True])
def test_steps(name: str, given: bool) -> None:
    source = model_of(name)
    optimized = xopt.optimize(source, dtype=torch.float32)
    words = torch.randint(0, 64, (2, 12))
    full = torch.ones_like(words)
    padded = full.clone()
    padded[0, :3] = 0
    for mask in (None, full, padded, None, padded):
        for batch in (2, 1):
            cut = None if mask is None else mask[:batch]
            ours, theirs = (steps_of(model, words[:batch], cut, given) for model in (optimized, source))
            for step, (result, expected) in enumerate(zip(ours, theirs, strict=True)):
                seen = slice(3 if step == 0 else 0, None)  # what is padded is nobody's
                torch.testing.assert_close(result[:, seen], expected[:, seen], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_step_is_one_program(name: str) -> None:
    optimized = xopt.optimize(model_of(name), dtype=torch.bfloat16)
    steps_of(optimized, torch.randint(0, 64, (1, 12)), None, given=True)
    (whole,) = (fusion for fusion in xopt.report(optimized).fusions if fusion.path == "")
    assert whole.fused.count("attention") == SMALL["num_hidden_layers"], whole
    assert whole.problem is None


def test_caches_of_other_kinds_in_turns() -> None:
    """What a program takes for granted of a cache (which layers slide) is asked in each call."""
    source = model_of("mistral")
    optimized = xopt.optimize(source, dtype=torch.float32)
    words = torch.randint(0, 64, (1, 9))
    plain = copy.deepcopy(source.config)
    plain.sliding_window = None
    with torch.no_grad():
        for config in (source.config, plain, source.config, plain, plain):
            caches = [transformers.DynamicCache(config=config) for _ in range(2)]
            for part in (words[:, :3], words[:, 3:4], words[:, 4:8], words[:, 8:]):
                ours, theirs = (
                    model(part, past_key_values=cache, use_cache=True).logits
                    for model, cache in zip((optimized, source), caches, strict=True)
                )
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_generate(name: str) -> None:
    source = model_of(name)
    optimized = xopt.optimize(source, dtype=torch.float32)
    words = torch.randint(1, 64, (2, 5))
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        arguments = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(words), **options}
        assert torch.equal(optimized.generate(words, **arguments), source.generate(words, **arguments))
