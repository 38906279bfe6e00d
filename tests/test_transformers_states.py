"""Language models whose caches hold states of one size (linear attention, state spaces, convolutions), alone or beside
keys and values: the whole model is one program, which leaves the cache as the source would."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import xopt
from tests.test_transformers_cache import expect_same_caches

SMALL: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0},
}
LINEAR: dict[str, Any] = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "head_dim": 8,
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
TWO_LAYERS: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {**TWO_LAYERS, "state_size": 8}),
    "mamba 2": (
        "Mamba2",
        {**TWO_LAYERS, "num_heads": 8, "head_dim": 8, "state_size": 8},
    ),
    "qwen 3.5": ("Qwen3_5Text", {**SMALL, **LINEAR}),
    "qwen 3 next": ("Qwen3Next", {**SMALL, **LINEAR, "num_experts": 4, "num_experts_per_tok": 2}),
    "olmo hybrid": ("OlmoHybrid", {**SMALL, "num_key_value_heads": 4}),
    "falcon h1": ("FalconH1", {**SMALL, **MAMBA2, "mamba_d_ssm": 64}),
    "lfm 2": ("Lfm2", {**SMALL, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
}


def model_of(name: str) -> Any:
    kind, options = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(**options)).eval()


def cache_in(result: Any) -> Any:
    return result["past_key_values" if "past_key_values" in result else "cache_params"]


def step(model: Any, words: Tensor, cache: Any, **options: Any) -> Any:
    known = "cache_params" if type(model).__name__.startswith("Mamba") else "past_key_values"
    with torch.no_grad():
        return model(words, use_cache=True, **{known: cache}, **options)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("given", [False, True])
def test_steps(name: str, given: bool) -> None:
    source = model_of(name)
    optimized = xopt.optimize(source, dtype=torch.float32)
    for batch, ends in (
        (2, (5, 6, 7, 8, 10, 11)),
        (1, (5, 6, 7)),
        (1, (2, 3, 4)),
        (2, (5, 6, 9, 10, 11)),
        (3, (1, 2, 3)),
    ):
        words = torch.randint(1, 64, (batch, ends[-1]))
        caches: list[Any] = [transformers.DynamicCache(config=source.config) if given else None for _ in range(2)]
        for begin, end in zip((0, *ends), ends, strict=False):
            results = [step(*each) for each in zip((optimized, source), 2 * [words[:, begin:end]], caches, strict=True)]
            torch.testing.assert_close(results[0].logits, results[1].logits, atol=1e-4, rtol=1e-4)
            caches = list(map(cache_in, results))
            expect_same_caches(*caches)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_one_program(name: str) -> None:
    optimized = xopt.optimize(model_of(name), dtype=torch.bfloat16)
    cache: Any = None
    for length in (3, 1, 1):
        cache = cache_in(step(optimized, torch.randint(1, 64, (1, length)), cache))
    whole = [fusion for fusion in xopt.report(optimized).fusions if fusion.path == optimized.base_model_prefix]
    assert not whole or whole[0].problem is None, whole
    (root,) = (fusion for fusion in xopt.report(optimized).fusions if fusion.path == "")
    assert root.problem is None, root


@pytest.mark.parametrize("name", ["mamba", "qwen 3.5", "lfm 2"])
def test_a_cache_that_was_reset_or_belongs_to_both(name: str) -> None:
    """What a program takes for granted of a cache is asked in each call, whoever filled it."""
    source = model_of(name)
    optimized = xopt.optimize(source, dtype=torch.float32)
    words = torch.randint(1, 64, (2, 6))
    cache = cache_in(step(optimized, words, None))
    for length in (1, 1, 1):
        part = words[:, :length]
        copied = copy.deepcopy(cache)
        results = step(optimized, part, cache), step(source, part, copied)
        torch.testing.assert_close(results[0].logits, results[1].logits, atol=1e-4, rtol=1e-4)
        expect_same_caches(cache, copied)
        cache = copied
    other = copy.deepcopy(cache)
    for each in (cache, other):
        each.reset()
    for part in (words[:, :4], words[:, 4:5]):
        results = step(optimized, part, cache), step(source, part, other)
        torch.testing.assert_close(results[0].logits, results[1].logits, atol=1e-4, rtol=1e-4)
        expect_same_caches(cache, other)


@pytest.mark.parametrize("name", CONFIGS)
def test_generate(name: str) -> None:
    source = model_of(name)
    optimized = xopt.optimize(source, dtype=torch.float32)
    words = torch.randint(1, 64, (2, 5))
    for options in ({}, {"num_beams": 2}):
        arguments = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(words), **options}
        assert torch.equal(optimized.generate(words, **arguments), source.generate(words, **arguments))


@torch.no_grad()
def test_a_cache_that_keeps_the_past_is_left_to_its_own_code() -> None:
    source = model_of("lfm 2")
    optimized = xopt.optimize(source, dtype=torch.float32)
    words = torch.randint(1, 64, (1, 6))
    caches = [transformers.DynamicCache(config=source.config) for _ in range(2)]
    for cache in caches:
        for layer in cache.layers:
            vars(layer)["record_past"] = True
    for part in (words[:, :4], words[:, 4:5]):
        results = [step(*each) for each in zip((optimized, source), 2 * [part], caches, strict=True)]
        torch.testing.assert_close(results[0].logits, results[1].logits, atol=1e-4, rtol=1e-4)
        expect_same_caches(*caches)


def states_in(cache: Any) -> list[Tensor]:
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return [state for layer in layers for state in (*layer.conv_states.values(), *layer.recurrent_states.values())]


def in_steps(name: str) -> tuple[Any, Any]:
    """A model and its cache after some steps, the next of which is a program."""
    optimized = xopt.optimize(model_of(name), dtype=torch.bfloat16)
    cache: Any = None
    for length in (5, 1, 1, 1):
        cache = cache_in(step(optimized, torch.randint(1, 64, (1, length)), cache))
    return optimized, cache


@pytest.mark.parametrize("name", ["mamba", "qwen 3.5", "falcon h1"])
def test_states_are_handed_over(name: str) -> None:
    """The tensors of a cache stay; what a step has made becomes their memory, and is not copied."""
    optimized, cache = in_steps(name)
    states = states_in(cache)
    before = [state.data_ptr() for state in states]
    step(optimized, torch.tensor([[7]]), cache)
    assert all(one is other for one, other in zip(states_in(cache), states, strict=True))
    assert not any(one.data_ptr() == other for one, other in zip(states, before, strict=True))


@pytest.mark.parametrize("name", ["mamba", "qwen 3.5", "falcon h1"])
def test_views_of_states_see_what_a_step_leaves(name: str) -> None:
    optimized, cache = in_steps(name)
    states = states_in(cache)
    views, kept = [state[:, 1:] for state in states], [state.clone() for state in states]
    step(optimized, torch.tensor([[7]]), cache)
    for state, view, old in zip(states, views, kept, strict=True):
        assert torch.equal(view, state[:, 1:])
        assert not torch.equal(state, old)


class Remembering(torch.nn.Module):
    """Adds up what it is given, and returns the sum that its cache holds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        new = self.layer(x)
        held = cache.get_recurrent_state(0)
        state = new if held is None else new + held
        cache.update_recurrent_state(state, 0)
        return self.layer(state), state


class Rememberer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Remembering()

    def forward(self, x: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        out, state = self.inside(x, cache)
        return out, state


@torch.no_grad()
def test_a_state_that_is_returned_as_well_is_nobody_s_but_the_caller_s() -> None:
    config = transformers.MambaConfig(**TWO_LAYERS)
    source = Rememberer().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    found = []
    for model in (source, optimized):
        torch.manual_seed(0)
        cache: Any = transformers.DynamicCache(config=config)
        cache.layers[0].update_recurrent_state(torch.zeros(2, 8))
        cache.layers[0].has_previous_state[0] = True
        returned = [model(torch.randn(2, 8), cache)[1] for _ in range(5)]
        found.append((torch.stack(returned), states_in(cache)[0]))
    torch.testing.assert_close(found[1], found[0])
    assert len({float(state[0, 0]) for state in found[1][0]}) == 5
