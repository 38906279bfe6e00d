"""Layers whose weight torch computes from other parameters: packed once, and again when those change."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import xopt
from tests.families import kernel_calls
from tests.test_chain_programs import lengths_of_chains
from tests.test_optimize_conv import relative_error


class Audio(nn.Module):
    def __init__(self, norm: Callable[..., Any]) -> None:
        super().__init__()
        self.first: Any = norm(nn.Conv1d(1, 32, 10, 5))
        self.second = norm(nn.Conv1d(32, 40, 3, groups=4))
        self.gate, self.up, self.head = (norm(nn.Linear(40, 48)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.second(nn.functional.gelu(self.first(x)))).transpose(1, 2)
        gate, up, head = self.gate(x), self.up(x), self.head(x)
        result: torch.Tensor = nn.functional.silu(gate) * up + head
        return result


NORMS: dict[str, Callable[..., Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "hook of weight_norm": nn.utils.weight_norm,
    "hook of spectral_norm": nn.utils.spectral_norm,
}


def make(name: str, kind: type[nn.Module] = Audio) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():  # of the older ones, that there are newer ones
        warnings.simplefilter("ignore", FutureWarning)
        return kind(NORMS[name]).eval()


FACTOR = {"weight_norm": "parametrizations.weight.original0", "hook of weight_norm": "weight_g"}
WEIGHT = {"spectral_norm": "parametrizations.weight.original", "hook of spectral_norm": "weight_orig"}
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
        source(SOUND)  # whose hooks compute weights
    assert relative_error(result, exact) <= 1.1 * relative_error(plain, exact) + 1e-6
    assert kernel_calls() != before
    assert type(optimized.first).__name__ == type(source.first).__name__
    assert parametrize.is_parametrized(optimized.first) == parametrize.is_parametrized(source.first)
    torch.testing.assert_close(optimized.first.weight, source.first.weight)
    state = optimized.state_dict()
    assert list(state) == list(kept)
    assert all(torch.equal(value, kept[key]) for key, value in state.items())
    assert all(torch.equal(value, kept[key]) for key, value in source.state_dict().items())
    report = xopt.report(optimized)
    assert (report.optimized_conv_share, report.optimized_linear_share) == (1.0, 1.0)
    assert {"conv+gelu_erf", "gated linear (silu)"} <= {step for each in report.fusions for step in each.fused}


@pytest.mark.parametrize("name", ["weight_norm", "hook of weight_norm"])
def test_new_values_are_seen(name: str) -> None:
    source, other = make(name), make(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        optimized = xopt.optimize(source, dtype=torch.float32)
        expected = other(SOUND)
        assert relative_error(optimized(SOUND), expected) > 0.1
        optimized.load_state_dict(other.state_dict())
        torch.testing.assert_close(optimized(SOUND), expected)
        for model in (optimized, other):
            dict(model.first.named_parameters())[FACTOR[name]].mul_(2)
        torch.testing.assert_close(optimized(SOUND), other(SOUND))
        torch.testing.assert_close(copy.deepcopy(optimized)(SOUND), other(SOUND))
        torch.testing.assert_close(optimized.double()(SOUND.double()), other.double()(SOUND.double()))


@pytest.mark.parametrize("name", NORMS)
def test_such_layers_are_links_of_chains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Chained(nn.Module):
        def __init__(self, norm: Callable[..., Any]) -> None:
            super().__init__()
            self.first: Any = norm(nn.Conv1d(1, 32, 10, 5))
            self.second = norm(nn.Conv1d(32, 40, 3, groups=4))
            self.head = norm(nn.Linear(40, 48))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.gelu(self.second(nn.functional.gelu(self.first(x))))
            result: torch.Tensor = self.head(x.transpose(1, 2))
            return result

    chained = lengths_of_chains(monkeypatch)
    source = make(name, Chained)
    optimized = xopt.optimize(source, dtype=torch.float32, inplace=False)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(optimized(SOUND), source(SOUND), rtol=1e-4, atol=1e-4)
        assert chained == [4] * 3
        for model in (source, optimized):
            dict(model.second.named_parameters())[(FACTOR | WEIGHT)[name]].mul_(1.5)
        torch.testing.assert_close(optimized(SOUND), source(SOUND), rtol=1e-4, atol=1e-4)
    assert chained == [4] * 4


@pytest.mark.parametrize("name", ["hook of weight_norm", "hook of spectral_norm"])
def test_a_hook_that_computes_the_weight_is_kept_apart(name: str) -> None:
    class Upsampler(nn.Module):
        def __init__(self, norm: Callable[..., Any]) -> None:
            super().__init__()
            self.up, self.head = norm(nn.ConvTranspose1d(1, 8, 4, 2)), norm(nn.Conv1d(8, 2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(nn.functional.leaky_relu(self.up(x)))
            return result

    source = make(name, Upsampler)
    with torch.no_grad():
        expected = source(SOUND)
        optimized = xopt.optimize(source, dtype=torch.float32)
        for model in (optimized, copy.deepcopy(optimized)):
            torch.testing.assert_close(model(SOUND), expected)
        assert xopt.report(optimized).fusions[0].fused
        audio = xopt.optimize(make(name), dtype=torch.float32)
        torch.testing.assert_close(pickle.loads(pickle.dumps(audio))(SOUND), audio(SOUND))
        torch.testing.assert_close(source(SOUND), expected)
    assert source.up._forward_pre_hooks
    assert not optimized.up._forward_pre_hooks


def test_another_hook_beside_it_leaves_the_layer_to_torch() -> None:
    source = make("hook of weight_norm")
    seen: list[Any] = []
    source.first.register_forward_pre_hook(lambda module, args: seen.append(args))
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(optimized(SOUND), source(SOUND))
    assert len(seen) == 2
    assert "no parameter of its own" in next(
        each.detail for each in xopt.report(optimized).entries if each.path == "first"
    )


@pytest.mark.parametrize("name", ["weight_norm", "hook of weight_norm"])
def test_gradients_reach_the_parameters(name: str) -> None:
    optimized = xopt.optimize(make(name), dtype=torch.float32)
    original = dict(optimized.first.named_parameters())[FACTOR[name].replace("0", "1").replace("_g", "_v")]
    original.requires_grad_()
    optimized(SOUND).sum().backward()
    assert original.grad is not None
