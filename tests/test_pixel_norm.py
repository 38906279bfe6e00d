"""Norms over pixels in recorded forwards, and what is made of them (ConvNeXt V2's response normalization)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.families import kernel_calls
from tests.test_chain_programs import lengths_of_chains
from tests.test_optimize_conv import fused_in, relative_error, settled

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda x: x.norm(2, (1, 2), True),
    "by names": lambda x: x.norm(p=2, dim=(1, 2), keepdim=True),
    "function": lambda x: torch.norm(x, dim=(-3, -2), keepdim=True),
    "vector norm": lambda x: torch.linalg.vector_norm(x, ord=2, dim=(1, 2), keepdim=True),
    "without dimensions": lambda x: torch.linalg.vector_norm(x, 2, (1, 2))[:, None, None],
    "channels first": lambda x: x.permute(0, 3, 1, 2).norm(2, (2, 3), True).permute(0, 2, 3, 1),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.norm(1, (1, 2), True),
    "channels": lambda x: x.norm(2, -1, True),
    "lines": lambda x: x.norm(2, (1,), True),
    "another dtype": lambda x: torch.linalg.vector_norm(x, 2, (1, 2), True, dtype=torch.float64).float(),
}


class ResponseNorm(nn.Module):
    def __init__(self, norm: Callable[[Tensor], Tensor], channels: int = 24) -> None:
        super().__init__()
        self.norm, self.weight, self.bias = norm, nn.Parameter(torch.rand(channels)), nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        norms = self.norm(x)
        return x + torch.addcmul(self.bias, self.weight, x * (norms / (norms.mean(dim=-1, keepdim=True) + 1e-6)))


class Block(nn.Module):
    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.depthwise, self.up, self.down = (
            nn.Conv2d(12, 12, 3, padding=1, groups=12),
            nn.Linear(12, 24),
            nn.Linear(24, 12),
        )
        self.response, self.last = ResponseNorm(norm), nn.Conv2d(12, 12, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.up(self.depthwise(x).permute(0, 2, 3, 1)).relu()
        result: Tensor = self.last(self.down(self.response(tokens)).permute(0, 3, 1, 2))
        return result


def images(count: int, size: int) -> Tensor:
    return torch.randn(count, 12, size, size + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
@torch.no_grad()
def test_found_and_exact(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    source = settled(Block(NORMS[name]))
    optimized = xopt.optimize(source, dtype=dtype)
    chained = lengths_of_chains(monkeypatch)
    for count, size in ((2, 40), (2, 40), (1, 60), (3, 30)):
        x = images(count, size)
        exact = copy.deepcopy(source).double()(x.double())
        plain = relative_error(copy.deepcopy(source).to(dtype)(x.to(dtype)), exact)
        assert relative_error(optimized(x), exact) <= 1.1 * plain + 1e-6
    assert "norm of pixels" in fused_in(optimized)
    assert len(chained) == 4  # of one chain each


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_other_norms_stay_torchs(name: str) -> None:
    source = settled(Block(OTHERS[name]))
    optimized = xopt.optimize(source)
    for _ in range(2):
        x = images(2, 9)
        torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)
    assert "norm of pixels" not in fused_in(optimized)


@pytest.mark.program_fails
@torch.no_grad()
def test_images_with_channels_first_and_empty_ones() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(x.norm(2, (2, 3)))
            return result

    source = Norm().eval()
    optimized = xopt.optimize(source)
    for x in (images(2, 9), images(2, 9).contiguous(memory_format=torch.channels_last), images(2, 0)):
        torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)
    assert any("pool" in kernel for kernel in kernel_calls())


def test_gradients_are_torchs() -> None:
    source = settled(Block(NORMS["method"]))
    optimized = xopt.optimize(source)
    inputs = [images(2, 9).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    for model, x in zip((source, optimized), inputs, strict=True):
        model(x).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-3, atol=1e-4)
