"""transformers' experts, all of whose matrices lie in one parameter: packed, as exact as torch, with the same state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import xopt
from tests.test_transformers import WORDS, relative_error

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {**SIZES, "vocab_size": 250, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2}


def mixtral() -> Any:
    """Whose 2 * 40 rows of a gate do not end where a panel does."""
    config = transformers.MixtralConfig(**COMMON, intermediate_size=40, num_local_experts=5)
    return transformers.MixtralForCausalLM(config)


def gpt_oss() -> Any:
    """With its matrices as [in, out], biases, and a gate of its own."""
    config = transformers.GptOssConfig(**COMMON, intermediate_size=72, num_local_experts=4, head_dim=16)
    return transformers.GptOssForCausalLM(config)


def nemotron() -> Any:
    """Without a gate."""
    config = transformers.NemotronHConfig(
        **{**COMMON, "num_hidden_layers": 2},
        layer_types=["full_attention", "moe"],
        n_routed_experts=4,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=32,
        intermediate_size=48,
        n_group=1,
        topk_group=1,
        head_dim=16,
    )
    return transformers.NemotronHForCausalLM(config)


MODELS: list[Callable[[], Any]] = [mixtral, gpt_oss, nemotron]


def source_of(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    source = make().eval().requires_grad_(False)
    for part in source.modules():
        for name, parameter in part._parameters.items():
            if "proj" in name and parameter is not None:  # some are left as they were found
                torch.nn.init.normal_(parameter, std=0.1)
    source.set_experts_implementation("eager")
    return source


def experts_of(model: Any) -> Any:
    return next(part for part in model.modules() if "down_proj" in part._parameters)


def routing(experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of 9 tokens to two experts each, of which the first is nobody's."""
    index = torch.randint(1, experts, (9, 2))
    return torch.randn(9, 64), index, torch.rand(9, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_are_as_exact_as_torch(make: Callable[[], Any], dtype: torch.dtype) -> None:
    source = source_of(make)
    optimized = xopt.optimize(source, dtype=dtype)
    entry = next(each for each in xopt.report(optimized).entries if each.path.endswith("experts"))
    assert entry.detail == f"packed as {str(dtype).removeprefix('torch.')}"
    hidden, index, weights = routing(len(experts_of(source).down_proj))
    exact = copy.deepcopy(experts_of(source)).double()(hidden.double(), index, weights.double())
    theirs = copy.deepcopy(experts_of(source)).to(dtype)(hidden.to(dtype), index, weights.to(dtype))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        ours = experts_of(optimized)(hidden, index, weights)
    assert ours.dtype == hidden.dtype
    assert relative_error(ours, exact) <= 1.1 * relative_error(theirs, exact) + 1e-6


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_state_and_copies(make: Callable[[], Any]) -> None:
    source = source_of(make)
    kept = {name: value.clone() for name, value in source.state_dict().items()}
    optimized = xopt.optimize(source, dtype=torch.float32)
    state = optimized.state_dict()
    assert list(state) == list(kept)
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    expected = source(WORDS).logits
    other = {name: value * 0.9 for name, value in kept.items()}
    for model in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        torch.testing.assert_close(model(WORDS).logits, expected)
    optimized.load_state_dict(other)
    source.load_state_dict(other)
    torch.testing.assert_close(optimized(WORDS).logits, source(WORDS).logits)
    torch.testing.assert_close(optimized.double().float()(WORDS).logits, source(WORDS).logits)


@torch.no_grad()
def test_are_a_step_of_their_block() -> None:
    optimized = xopt.optimize(source_of(mixtral), dtype=torch.float32)
    optimized(WORDS)
    fused = {step for fusion in xopt.report(optimized).fusions for step in fusion.fused}
    assert {"experts", "attention", "linear+add+rms_norm"} <= fused


def test_gradients_with_respect_to_inputs() -> None:
    source = source_of(mixtral)
    optimized = xopt.optimize(source, dtype=torch.float32)
    hidden, index, weights = routing(5)
    given, expected = (hidden.clone().requires_grad_() for _ in range(2))
    experts_of(optimized)(given, index, weights).square().sum().backward()
    experts_of(source)(expected, index, weights).square().sum().backward()
    torch.testing.assert_close(given.grad, expected.grad)


@torch.no_grad()
def test_answers_of_nobody_and_keywords() -> None:
    source = source_of(mixtral)
    optimized = xopt.optimize(source, dtype=torch.float32)
    hidden, index, weights = routing(5)
    named = experts_of(optimized)(hidden, top_k_index=index, top_k_weights=weights)
    torch.testing.assert_close(named, experts_of(optimized)(hidden, index, weights))
    index[3] = 5
    try:
        expected = experts_of(source)(hidden, index, weights)
    except RuntimeError:
        pytest.skip("this version of transformers has no number for nobody")
    ours = experts_of(optimized)(hidden, index, weights)
    torch.testing.assert_close(ours, expected)
    assert not ours[3].any()
    named = experts_of(optimized)(hidden, top_k_index=index, top_k_weights=weights)
    torch.testing.assert_close(named, ours)
