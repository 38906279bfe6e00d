"""What stands between layers and is a link: softmax of any dimension, stacks, casts, padding, means, attention of
parts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.test_chain_programs import lengths_of_chains
from tests.test_optimize_conv import settled


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return lengths_of_chains(monkeypatch)


class BetweenRows(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(16, 24), nn.LazyLinear(8), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x).relu()))  # type: ignore[no-any-return]


def in_parts(x: Tensor) -> Tensor:
    """Heads of groups of rows (Twins)."""
    batch, rows = x.shape[:2]
    query, key, value = x.reshape(batch, rows // 2, 2, 3, 2, 4).permute(3, 0, 1, 4, 2, 5).unbind(0)
    attended = functional.scaled_dot_product_attention(query, key, value)
    return attended.transpose(2, 3).reshape(batch, rows, 8)


def of_queries(x: Tensor) -> Tensor:
    """Rows of a block are its queries (NesT), and the mask is the same for all."""
    query, key, value = x.reshape(x.shape[0], 2, -1, 3, 4, 2).permute(3, 0, 4, 1, 2, 5).unbind(0)
    mask = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool).tril()
    attended = functional.scaled_dot_product_attention(query, key, value, mask)
    return attended.permute(0, 2, 3, 1, 4).reshape(x.shape[0], -1, 8)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax of rows": lambda x: x.softmax(1),
    "softmax by a number": lambda x: torch.softmax(x, 2),
    "softmax of heads": lambda x: functional.softmax(x.unflatten(-1, (4, 6)), dim=-2).flatten(2),
    "stack": lambda x: torch.stack([x, x * 2.0], 1).sum(1),
    "stack behind": lambda x: torch.stack([x, x.square(), x * 0.5], dim=-1).flatten(2),
    "float": lambda x: x.float().square().to(x.dtype),
    "type_as": lambda x: x.sigmoid().type_as(x),
    "mean": lambda x: x.mean(1),
    "mean that keeps": lambda x: x - x.mean(1, keepdim=True),
    "mean of a grid": lambda x: x.unflatten(1, (2, -1)).mean((1, 2)),
    "attention in parts": in_parts,
    "attention of queries": of_queries,
    "padded rows": lambda x: functional.pad(x, (0, 0, 1, 2)),
    "padded to a multiple": lambda x: functional.pad(x, (0, 0, 0, -x.shape[1] % 8), value=1.0),
    "cut": lambda x: functional.pad(x, (0, 0, -1, 0)),
}
ALSO_ELSEWHERE = ("stack", "attention of queries")  # a sum, and a mask that is made of sizes


def error_of(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def check(source: nn.Module, x: Tensor, dtype: torch.dtype, optimized: nn.Module) -> None:
    """Against fp64, and no worse than torch is in that dtype."""
    with torch.no_grad():
        expected = copy.deepcopy(source).double()(x.double())
        torchs = error_of(copy.deepcopy(source).to(dtype)(x.to(dtype)), expected)
        result = optimized(x)
        assert result.shape == expected.shape
        assert error_of(result, expected) <= (2e-6 if dtype == torch.float32 else 1.25 * torchs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_between_rows(name: str, dtype: torch.dtype, chained: list[int]) -> None:
    source = BetweenRows(ROWS[name])
    with torch.no_grad():
        source(torch.randn(2, 8, 16))
    source.eval()
    optimized = xopt.optimize(copy.deepcopy(source), dtype=dtype)
    for batch, rows in ((2, 8), (1, 8), (3, 12), (2, 8), (2, 8)):
        check(source, torch.randn(batch, rows, 16), dtype, optimized)
    assert len(chained) >= 5
    assert name in ALSO_ELSEWHERE or len(chained) == 5


class BetweenImages(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between = nn.Conv2d(3, 8, 3, padding=1), between
        self.last = nn.Conv2d(8, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x).relu()))  # type: ignore[no-any-return]


def same(x: Tensor) -> Tensor:
    """As TensorFlow pads what a convolution of stride 2 reads."""
    across, down = (max((-(-size // 2) - 1) * 2 + 3 - size, 0) for size in (x.shape[3], x.shape[2]))
    return functional.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))


IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "padding by sizes": same,
    "padding on two sides": lambda x: functional.pad(x, (0, 1, 0, 1)),
    "padding of pixels": lambda x: functional.pad(x, (1, 1), value=0.5) * 2.0,
    "half as large": lambda x: functional.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "quarter": lambda x: functional.interpolate(x, scale_factor=(0.25, 1.0), mode="bilinear", align_corners=False),
    "softmax of channels": lambda x: x.softmax(1),
    "channels that were columns": lambda x: x.flatten(2).softmax(-1).reshape(x.shape[0], -1, *x.shape[2:]),
    "turned": lambda x: x.transpose(2, 3).sigmoid(),
    "tokens of heads": lambda x: x.flatten(2).reshape(-1, 4, x[0, 0].numel()).reshape(x.shape),
}


OTHER_LAYOUTS = ("softmax of channels", "turned")  # between convolutions they have their channels last, unlike torch's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", IMAGES)
def test_between_images(name: str, dtype: torch.dtype, chained: list[int]) -> None:
    source = settled(BetweenImages(IMAGES[name]))
    optimized = xopt.optimize(copy.deepcopy(source), dtype=dtype)
    for batch, height, width in ((2, 16, 16), (1, 16, 16), (2, 17, 13), (1, 12, 20), (2, 16, 16), (2, 16, 16)):
        x = torch.randn(batch, 3, height, width)
        check(source, x, dtype, optimized)
    assert len(chained) >= 6
    for _ in range(3 if name not in OTHER_LAYOUTS else 0):
        x = torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last)
        check(source, x, dtype, optimized)
        with torch.no_grad():
            assert optimized(x).stride() == source(x).stride()
