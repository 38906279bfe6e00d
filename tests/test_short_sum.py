"""Sums over a few splits or paths of a convolution."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.families import calls_of


class Splits(nn.Module):
    """ResNeSt's attention over splits of a convolution's channels."""

    def __init__(self, splits: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.splits = splits
        self.conv, self.last = nn.Conv2d(3, 8 * splits, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8 * splits, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        images, channels, *size = x.shape
        x = x.reshape(images, self.splits, channels // self.splits, *size)
        pixel = x.sum(dim=1).mean((2, 3), keepdim=True)
        factors = self.excite(self.squeeze(pixel).relu())
        factors = factors.view(images, 1, self.splits, -1).transpose(1, 2).softmax(1).reshape(images, -1)
        factors = factors.reshape(images, self.splits, channels // self.splits, 1, 1)
        return self.last((x * factors).sum(dim=1).contiguous())  # type: ignore[no-any-return]


class Paths(nn.Module):
    """SKNet's, over convolutions of one image."""

    def __init__(self, paths: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(3, 8, 3, padding=n + 1, dilation=n + 1) for n in range(paths))
        self.excite, self.last = nn.Conv2d(8, 8 * paths, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        together = torch.stack([conv(x).relu() for conv in self.convs], dim=1)
        factors = self.excite(together.sum(1).mean((2, 3), keepdim=True))
        images, channels, height, width = factors.shape
        factors = factors.view(images, len(self.convs), channels // len(self.convs), height, width)
        return self.last(torch.sum(input=together * torch.softmax(factors, dim=1), dim=1))  # type: ignore[no-any-return]


class OfTheInput(nn.Module):
    """Sums over images, of which there may be any number; over the last dimension; and what keeps the dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        halves = x.reshape(len(x), 2, 4, *x.shape[2:])
        pairs = x[..., :4].reshape(*x.shape[:3], 2, 2)
        x = x + x.sum(0) + halves.sum(1, keepdim=True).sum((1, 2), keepdim=True)[:, 0]
        return self.last(x) + pairs.sum(-1).sum()  # type: ignore[no-any-return]


CONFIG = xopt.Config(fuse_pointwise=False)  # which would make one of several sums and products


def sums() -> int:
    return calls_of("combine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("make", "combined"), [(Splits, 4), (Paths, 4)])
@torch.no_grad()
def test_two_of_them(make: Any, combined: int, dtype: torch.dtype) -> None:
    source = make().eval()
    model, plain = xopt.optimize(source, dtype=dtype, config=CONFIG), copy.deepcopy(source).to(dtype)
    for images in (1, 2, 2, 3):
        x = torch.randn(images, 3, 12, 9)
        truth = copy.deepcopy(source).double()(x.double())
        before = sums()
        result = model(x)
        assert sums() - before == combined
        errors = [float((each.double() - truth).norm() / truth.norm()) for each in (result, plain(x.to(dtype)))]
        assert errors[0] <= 1.1 * errors[1] + 2e-7


@pytest.mark.parametrize("make", [Splits, Paths])
@pytest.mark.parametrize("count", [1, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_another_number_of_them(make: Any, count: int, dtype: torch.dtype) -> None:
    """Sums of more would be rounded more often, where that is not to fp32."""
    source = make(count).eval()
    model = xopt.optimize(source, dtype=dtype, config=CONFIG)
    before = sums()
    x, tolerance = torch.randn(2, 3, 12, 9), 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(model(x), source(x), atol=tolerance, rtol=tolerance)
    added = sums() - before
    assert added == (3 * count - 2 if count in (3, 4) and dtype == torch.float32 else added)
    assert added <= 1 or dtype == torch.float32


@torch.no_grad()
def test_what_need_not_be_two_and_other_sums() -> None:
    source = OfTheInput().eval()
    model = xopt.optimize(source, dtype=torch.float32)
    for images in (2, 3, 1):
        x = torch.randn(images, 3, 8, 8)
        torch.testing.assert_close(model(x), source(x), atol=1e-4, rtol=1e-5)
