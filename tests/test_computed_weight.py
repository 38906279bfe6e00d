"""Layers whose weight torch computes from other parameters: packed once, and again when those change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import xopt
from tests.families import kernel_calls
from tests.test_optimize_conv import relative_error


class Audio(nn.Module):
    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.first: Any = norm(nn.Conv1d(1, 32, 10, 5))
        self.second = norm(nn.Conv1d(32, 40, 3, groups=4))
        self.gate, self.up, self.head = (norm(nn.Linear(40, 48)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.second(nn.functional.gelu(self.first(x)))).transpose(1, 2)
        gate, up, head = self.gate(x), self.up(x), self.head(x)
        result: torch.Tensor = nn.functional.silu(gate) * up + head
        return result


NORMS: dict[str, Callable[..., nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
}


def make(name: str) -> Audio:
    torch.manual_seed(0)
    return Audio(NORMS[name]).eval()


SOUND = torch.linspace(-2, 2, 400).sin().reshape(2, 1, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_packed_fused_and_exact(name: str, dtype: torch.dtype) -> None:
    source = make(name)
    kept = {key: value.clone() for key, value in source.state_dict().items()}
    with torch.no_grad():
        exact = copy.deepcopy(source).double()(SOUND.double())
        plain = copy.deepcopy(source).to(dtype)(SOUND.to(dtype))
        optimized = xopt.optimize(source, dtype=dtype)
        before = kernel_calls()
        for _ in range(2):
            result = optimized(SOUND)
    assert relative_error(result, exact) <= 1.1 * relative_error(plain, exact) + 1e-6
    assert kernel_calls() != before
    assert type(optimized.first).__name__ == "ParametrizedConv1d"
    assert parametrize.is_parametrized(optimized.first, "weight")
    state = optimized.state_dict()
    assert list(state) == list(kept)
    assert all(torch.equal(value, kept[key]) for key, value in source.state_dict().items())
    report = xopt.report(optimized)
    assert (report.optimized_conv_share, report.optimized_linear_share) == (1.0, 1.0)
    assert {"conv+gelu_erf", "gated linear (silu)"} <= {step for each in report.fusions for step in each.fused}


def test_new_values_are_seen() -> None:
    source, other = make("weight_norm"), make("weight_norm")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        optimized = xopt.optimize(source, dtype=torch.float32)
        expected = other(SOUND)
        assert relative_error(optimized(SOUND), expected) > 0.1
        optimized.load_state_dict(other.state_dict())
        torch.testing.assert_close(optimized(SOUND), expected)
        for model in (optimized, other):
            model.first.parametrizations.weight.original0.mul_(2)
        torch.testing.assert_close(optimized(SOUND), other(SOUND))
        torch.testing.assert_close(copy.deepcopy(optimized)(SOUND), other(SOUND))
        torch.testing.assert_close(optimized.double()(SOUND.double()), other.double()(SOUND.double()))


def test_gradients_reach_the_parameters() -> None:
    optimized = xopt.optimize(make("weight_norm"), dtype=torch.float32)
    original = optimized.first.parametrizations.weight.original1
    original.requires_grad_()
    optimized(SOUND).sum().backward()
    assert original.grad is not None
