"""A BatchNorm of frozen statistics, written out as detectors have it, is done with a convolution's sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.test_optimize_conv import ROUNDING, fused_in, relative_error


class Frozen(nn.Module):
    def __init__(self, channels: int, apply: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(channels) + 0.5)
        self.register_buffer("bias", torch.randn(channels))
        self.register_buffer("running_mean", torch.randn(channels))
        self.register_buffer("running_var", torch.rand(channels) + 0.5)
        self.eps = 1e-5
        self.apply_norm = apply

    def forward(self, x: Tensor) -> Any:
        return self.apply_norm(self, x)


def as_torchvision(norm: Any, x: Tensor) -> Any:
    shape = (1, -1) + (1,) * (x.ndim - 2)
    weight, bias = norm.weight.reshape(shape), norm.bias.reshape(shape)
    scale = weight * (norm.running_var.reshape(shape) + norm.eps).rsqrt()
    return x * scale + (bias - norm.running_mean.reshape(shape) * scale)


def as_detectron(norm: Any, x: Tensor) -> Any:
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    bias = norm.bias - norm.running_mean * scale
    key = (None, slice(None), *(None,) * (x.ndim - 2))
    return bias[key].to(x.dtype) + scale[key].to(x.dtype) * x


def another_scale(norm: Any, x: Tensor) -> Any:
    scale = (norm.weight * (norm.running_var + norm.eps).rsqrt()).view(1, -1, 1, 1)
    bias = norm.bias.view(1, -1, 1, 1) - norm.running_mean.view(1, -1, 1, 1) * norm.weight.view(1, -1, 1, 1)
    return x * scale + bias


def along_another_dimension(norm: Any, x: Tensor) -> Any:
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return x * scale + (norm.bias - norm.running_mean * scale)


def residual(kind: Any, apply: Callable[[Any, Tensor], Any], dims: int) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (kind(12, 12, 3, padding=1, bias=False) for _ in range(2))
            self.norms = nn.ModuleList([Frozen(12, apply), Frozen(12, apply)])

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.norms[0](self.first(x)))
            return torch.relu(self.norms[1](self.second(y)) + x)

    return nn.Sequential(Block(), Block()).eval()


KINDS = {"conv1d": (nn.Conv1d, 1), "conv2d": (nn.Conv2d, 2), "conv3d": (nn.Conv3d, 3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apply", [as_torchvision, as_detectron], ids=lambda apply: apply.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_fused(kind: str, apply: Callable[[Any, Tensor], Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made, dims = KINDS[kind]
    source = residual(made, apply, dims)
    x = torch.randn(2, 12, *(6,) * dims)
    with torch.no_grad():
        exact = copy.deepcopy(source).double()(x.double())
    optimized = xopt.optimize(source, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        plain = source(x)
    with torch.no_grad():
        for _ in range(2):
            result = optimized(x)
    assert result.dtype == torch.float32
    assert relative_error(result, exact) <= 1.1 * relative_error(plain, exact) + ROUNDING
    assert fused_in(optimized).count("conv+batch_norm+relu") == 2
    assert fused_in(optimized).count("conv+batch_norm+add+relu") == 2


def test_other_formulas_are_not() -> None:
    torch.manual_seed(0)
    for apply in (another_scale, along_another_dimension):
        source = residual(nn.Conv2d, apply, 2)
        optimized = xopt.optimize(source, dtype=torch.float32)
        x = torch.randn(2, 12, 12, 12)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-4)
        assert not any("batch_norm" in step for step in fused_in(optimized))


def test_statistics_that_change_are_seen() -> None:
    torch.manual_seed(0)
    source: Any = residual(nn.Conv2d, as_torchvision, 2)
    optimized: Any = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(2, 12, 6, 6)
    with torch.no_grad():
        for change in range(4):
            for model in (source, optimized):
                norm: Any = model[1].norms[0]
                if change == 1:
                    norm.running_var.mul_(3.0)
                elif change == 2:
                    norm.bias = torch.ones(12)
                elif change == 3:
                    norm.eps = 0.5
            for _ in range(2):
                torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-4)
    assert xopt.report(optimized).fusions[0].fused.count("conv+batch_norm+relu") == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_rounded_by_all_of_its_readers_is_written_so(dtype: torch.dtype) -> None:
    """The same numbers, bit for bit, whether there is a reader of all of it besides."""

    class Reads(nn.Module):
        def __init__(self, also_whole: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.third = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(3))
            self.norm = Frozen(16, as_torchvision)
            self.also_whole = also_whole

        def forward(self, x: Tensor) -> Any:
            y = self.norm(self.first(x))
            results = self.second(y), self.third(y)
            return (*results, y * 2) if self.also_whole else results

    x = torch.randn(1, 16, 9, 9)
    one, other = (xopt.optimize(Reads(also_whole).eval(), dtype=dtype) for also_whole in (False, True))
    with torch.no_grad():
        for _ in range(2):
            results, known = one(x), other(x)
            assert all(map(torch.equal, results, known))
