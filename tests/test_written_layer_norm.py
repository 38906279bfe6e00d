"""LayerNorm that modules write out: found in the ways that people write it, left where it is something else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.test_optimize_conv import fused_in, relative_error

X = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0)) + 1
Written = Callable[[Any, Tensor], Tensor]


class Normed(nn.Module):
    """`norm` is what differs."""

    def __init__(self, norm: Written) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.rand(48) + 0.5), nn.Parameter(torch.randn(48))
        self.out, self.eps, self.norm = nn.Linear(48, 48), 1e-3, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self, x + self.out(x))


def as_in_ibert(module: Any, x: Tensor) -> Tensor:
    mean = x.mean(axis=2, keepdim=True)  # type: ignore[call-overload]
    y = x - mean
    var = torch.mean(y**2, axis=2, keepdim=True)  # type: ignore[call-overload]
    x = y / torch.sqrt(module.eps + var)
    return x * module.weight + module.bias  # type: ignore[no-any-return]


def with_rsqrt(module: Any, x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.pow(2).mean(-1, keepdim=True)
    return module.bias + module.weight * (centered * torch.rsqrt(variance + module.eps))  # type: ignore[no-any-return]


def centered_twice(module: Any, x: Tensor) -> Tensor:
    mean = torch.mean(x, dim=(-1,), keepdim=True)
    centered = torch.sub(x, mean)
    variance = (centered * centered).mean(dim=-1, keepdim=True)
    return centered / (variance + module.eps).sqrt() * module.weight + module.bias  # type: ignore[no-any-return]


def in_fp32(module: Any, x: Tensor) -> Tensor:
    y = x.float()
    y = y - y.mean(-1, keepdim=True)
    y = y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + module.eps)
    return (y * module.weight + module.bias).to(x.dtype)  # type: ignore[no-any-return]


def over_the_sequence(module: Any, x: Tensor) -> Tensor:
    y = x - x.mean(1, keepdim=True)
    return y / torch.sqrt(y.pow(2).mean(1, keepdim=True) + module.eps) * module.weight + module.bias  # type: ignore[no-any-return]


def by_the_deviation(module: Any, x: Tensor) -> Tensor:
    y = x - x.mean(-1, keepdim=True)
    return y / (torch.sqrt(y.pow(2).mean(-1, keepdim=True)) + module.eps) * module.weight + module.bias  # type: ignore[no-any-return]


def not_centered(module: Any, x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight + module.bias  # type: ignore[no-any-return]


def of_another(module: Any, x: Tensor) -> Tensor:
    y = x - (x * 2).mean(-1, keepdim=True)
    return y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight + module.bias  # type: ignore[no-any-return]


def of_the_absolute(module: Any, x: Tensor) -> Tensor:
    y = x - x.mean(-1, keepdim=True)
    return y / torch.sqrt(y.abs().mean(-1, keepdim=True) + module.eps) * module.weight + module.bias  # type: ignore[no-any-return]


FOUND = [as_in_ibert, with_rsqrt, centered_twice, in_fp32]
OTHERS = [over_the_sequence, by_the_deviation, not_centered, of_another, of_the_absolute]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [*FOUND, *OTHERS])
@torch.no_grad()
def test_exact_and_found(norm: Written, dtype: torch.dtype) -> None:
    source = Normed(norm).eval()
    optimized = xopt.optimize(source, dtype=dtype, sample_input=X)
    exact = copy.deepcopy(source).double()(X.double())
    plain = relative_error(copy.deepcopy(source).to(dtype)(X.to(dtype)), exact)
    for x in (X, X[:1, :3]):
        expected = exact[: x.shape[0], : x.shape[1]] if norm is not over_the_sequence else source(x).double()
        assert relative_error(optimized(x), expected) <= 1.1 * plain + 1e-6
    found = any("layer_norm" in label for label in fused_in(optimized))
    assert found == (norm in FOUND), fused_in(optimized)
