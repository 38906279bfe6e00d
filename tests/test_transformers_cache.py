"""Steps of language models with a cache of keys and values: the whole model is one program, in which caches grow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import xopt
from xopt import _C
from xopt.integrations import cache_layers
from xopt.modules import chain

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


# ---- What a step does to a cache -------------------------------------------------------------------------------------


def expect_same_caches(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(mine) is type(other)
        assert vars(mine).keys() == vars(other).keys()
        for name, value in vars(other).items():
            found = vars(mine)[name]
            for of_mine, of_other in zip(
                *([*x.values()] if type(x) is dict else [x] for x in (found, value)), strict=True
            ):
                if isinstance(of_other, Tensor):
                    torch.testing.assert_close(of_mine, of_other, atol=1e-4, rtol=1e-4)
                else:
                    assert of_mine == of_other, name


@pytest.fixture
def chains_called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    called: list[int] = []

    def count(tensors: list[Tensor], text: str) -> Any:
        called.append(len(tensors))
        return torch.ops.xopt.chain(tensors, text)

    monkeypatch.setattr(chain, "_chain", count)
    return called


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_one_chain(name: str, chains_called: list[int]) -> None:
    source = model_of(name)
    optimized = xopt.optimize(source, dtype=torch.float32)
    ours, theirs = (transformers.DynamicCache(config=source.config) for _ in range(2))
    with torch.no_grad():
        for step in range(12):
            words = torch.randint(0, 64, (1, 5 if step == 0 else 1))
            chains_called.clear()
            before = _C.replayed_calls()
            logits = optimized(words, past_key_values=ours, use_cache=True).logits
            torch.testing.assert_close(
                logits, source(words, past_key_values=theirs, use_cache=True).logits, atol=1e-4, rtol=1e-4
            )
            expect_same_caches(ours, theirs)
            if step > 6:  # sliding layers are full
                assert _C.replayed_calls() > before
                assert len(chains_called) == 1 or name in ("mistral", "gemma"), (step, chains_called)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_cache_one_is_made(name: str, chains_called: list[int]) -> None:
    """As transformers' models do by default; a caller may go on with it, and has another one of each call."""
    source = model_of(name)
    optimized = xopt.optimize(source, dtype=torch.float32)
    made = []
    with torch.no_grad():
        for length in (5, 7, 2, 1, 5):
            words = torch.randint(0, 64, (2, length))
            chains_called.clear()
            ours, theirs = (model(words) for model in (optimized, source))
            assert type(ours.past_key_values) is type(theirs.past_key_values)
            expect_same_caches(ours.past_key_values, theirs.past_key_values)
            for _ in range(2):
                following = torch.randint(0, 64, (2, 1))
                logits = [
                    model(following, past_key_values=result.past_key_values).logits
                    for model, result in ((optimized, ours), (source, theirs))
                ]
                torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
            expect_same_caches(ours.past_key_values, theirs.past_key_values)
            made.append(ours.past_key_values)
    lengths = {id(cache): cache.layers[-1].keys.shape[2] for cache in made}
    assert len(lengths) == 5
    assert name != "llama" or [*lengths.values()] == [7, 9, 4, 3, 7]
    (whole,) = (fusion for fusion in xopt.report(optimized).fusions if fusion.path == "")
    assert whole.problem is None


@pytest.mark.parametrize("given", [False, True])
def test_a_prompt_is_one_chain(given: bool, chains_called: list[int]) -> None:
    optimized = xopt.optimize(model_of("llama"), dtype=torch.bfloat16)
    with torch.no_grad():
        for length in (3, 3, 3, 8):
            cache = transformers.DynamicCache(config=optimized.config) if given else None
            chains_called.clear()
            result = optimized(torch.randint(0, 64, (1, length)), past_key_values=cache)
            assert result.past_key_values.get_seq_length() == length
    assert len(chains_called) == 1


@pytest.mark.parametrize("make", [transformers.BartConfig, transformers.T5Config])
def test_encoder_decoders_make_two(make: Any) -> None:
    sizes = {"d_model": 32, "vocab_size": 64, "decoder_start_token_id": 0}
    if make is transformers.T5Config:
        sizes |= {"d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    else:
        sizes |= {
            f"{part}_{name}": size
            for part in ("encoder", "decoder")
            for name, size in (("layers", 2), ("ffn_dim", 48), ("attention_heads", 4))
        }
    torch.manual_seed(0)
    source = transformers.AutoModelForSeq2SeqLM.from_config(make(**sizes)).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            words, first = torch.randint(1, 64, (2, 6)), torch.randint(1, 64, (2, 2))
            results = [model(words, decoder_input_ids=first) for model in (optimized, source)]
            for _ in range(4):
                for part in ("self_attention_cache", "cross_attention_cache"):
                    expect_same_caches(*(getattr(each.past_key_values, part) for each in results))
                assert results[0].past_key_values.is_updated == results[1].past_key_values.is_updated
                next_word = torch.randint(1, 64, (2, 1))
                results = [
                    model(
                        encoder_outputs=(each.encoder_last_hidden_state,),
                        decoder_input_ids=next_word,
                        past_key_values=each.past_key_values,
                    )
                    for model, each in zip((optimized, source), results, strict=True)
                ]
                torch.testing.assert_close(results[0].logits, results[1].logits, atol=1e-4, rtol=1e-4)


def test_large_caches_are_updated_layer_by_layer(monkeypatch: pytest.MonkeyPatch, chains_called: list[int]) -> None:
    source = model_of("llama")
    optimized = xopt.optimize(source, dtype=torch.float32)
    ours, theirs = (transformers.DynamicCache(config=source.config) for _ in range(2))
    most = cache_layers._MOST_BYTES
    with torch.no_grad():
        for limit in (most, most, most, 0, 0, 0, most):
            monkeypatch.setattr(cache_layers, "_MOST_BYTES", limit)
            words = torch.randint(0, 64, (1, 1))
            chains_called.clear()
            results = [
                model(words, past_key_values=cache, use_cache=True).logits
                for model, cache in ((optimized, ours), (source, theirs))
            ]
            torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
            expect_same_caches(ours, theirs)
    assert len(chains_called) == 1


def test_one_layer_for_all() -> None:
    """Each update adds to what the one before has set."""
    source = model_of("llama")
    optimized = xopt.optimize(source, dtype=torch.float32)
    caches = [transformers.DynamicCache(config=source.config) for _ in range(2)]
    with torch.no_grad():
        for step in range(5):
            if step == 2:
                for cache in caches:
                    cache.layers = [cache.layers[0]] * len(cache.layers)
            words = torch.randint(0, 64, (1, 1))
            ours, theirs = (
                model(words, past_key_values=cache, use_cache=True).logits
                for model, cache in zip((optimized, source), caches, strict=True)
            )
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            expect_same_caches(*caches)


def test_a_cache_of_another_dtype() -> None:
    """It is widened as torch does it, and stays what it has become."""
    optimized = xopt.optimize(model_of("llama"), dtype=torch.bfloat16)
    cache: Any = transformers.DynamicCache(config=optimized.config)
    with torch.no_grad():
        for _ in range(3):
            optimized(torch.randint(0, 64, (1, 2)), past_key_values=cache, use_cache=True)
        wide = copy.deepcopy(cache)
        for layer in wide.layers:
            layer.keys, layer.values = layer.keys.float(), layer.values.float()
        words = torch.randint(0, 64, (1, 1))
        ours, theirs = (optimized(words, past_key_values=each, use_cache=True).logits for each in (wide, cache))
    torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=3e-2)
    assert {layer.keys.dtype for layer in wide.layers} == {torch.float32}
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}


def test_a_cache_of_fewer_layers_than_the_model() -> None:
    source = model_of("llama")
    optimized = xopt.optimize(source, dtype=torch.float32)
    caches: Any = [transformers.DynamicCache() for _ in range(2)]
    first = torch.randn(2, 1, 2, 3, 8)
    with torch.no_grad():
        for cache in caches:
            cache.update(*first, 0)
        for _ in range(3):
            words = torch.randint(0, 64, (1, 1))
            ours, theirs = (
                model(words, past_key_values=cache).logits
                for model, cache in zip((optimized, source), caches, strict=True)
            )
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            expect_same_caches(*caches)


class Curious(nn.Module):
    """Asks a cache what it has become."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.asks = asks

    def heads(self, x: Tensor) -> Tensor:
        return self.linear(x).view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        new = self.heads(x)
        keys, values = cache.update(new, new + 1, 0)
        if self.asks == "length":
            keys = keys * cache.get_seq_length()
        elif self.asks == "another's length":
            keys = keys * cache.get_seq_length(1)
        elif self.asks == "keys":
            keys = keys + cache.layers[0].keys[:, :, -1:]
        elif self.asks == "again":
            keys, values = cache.update(keys[:, :, -1:] * 2, values[:, :, :1], 0)
        other, _ = cache.update(new * 3, new, 1)
        summed = (keys.sum(2, keepdim=True) + values.mean(2, keepdim=True) + other.amax(2, keepdim=True)).flatten(1)
        return self.out(self.out(summed[:, None].expand(-1, x.shape[1], -1)).relu() + x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("asks", ["nothing", "length", "another's length", "keys", "again"])
def test_what_a_cache_has_become(asks: str) -> None:
    source = Curious(asks).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    caches: Any = [transformers.DynamicCache() for _ in range(2)]
    first = torch.randn(2, 1, 2, 3, 4)
    for cache in caches if asks == "keys" else ():  # an empty one has none while the forward is recorded
        cache.update(*first, 0)
        cache.update(*first, 1)
    with torch.no_grad():
        for step in range(8):
            x = torch.randn(1, 1 + step % 2, 8)
            ours, theirs = (model(x, cache) for model, cache in zip((optimized, source), caches, strict=True))
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
            expect_same_caches(*caches)
    (whole,) = (fusion for fusion in xopt.report(optimized).fusions if fusion.path == "")
    assert whole.problem is None
    assert whole.fused
