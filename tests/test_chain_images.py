"""Images as links of chains: parts of them, rows that become images, interpolation, attention of channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.test_chain_programs import check, lengths_of_chains
from tests.test_optimize_conv import settled


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return lengths_of_chains(monkeypatch)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels": lambda x: x[:, :8],
    "lines": lambda x: x[:, 4:12, 1:-1],
    "parts": lambda x: x.chunk(2, 1)[1],
    "a part of a part": lambda x: x.split([12, 4], 1)[0][:, 4:, ::2],
}


def _normed(rows: Tensor) -> Tensor:
    return functional.layer_norm(rows, (16,))


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": lambda x: _normed(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)[:, :8],
    "viewed": lambda x: _normed(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)[:, :8],
    "a part": lambda x: _normed(x.permute(0, 2, 3, 1)).split([8, 8], -1)[1].permute(0, 3, 1, 2),
    "columns": lambda x: _normed(x.permute(0, 2, 3, 1))[..., 4:12].permute(0, 3, 1, 2),
    "viewed twice": lambda x: _normed(x.flatten(2).mT).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)[:, 8:],
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x[:, :8].transpose(2, 3),
    "a part of what is turned": lambda x: x.transpose(1, 2)[:, :8],
    "every second channel": lambda x: x[:, ::2],
    "every second column": lambda x: _normed(x.permute(0, 2, 3, 1))[..., ::2].permute(0, 3, 1, 2),
    "lines as channels": lambda x: _normed(x.permute(0, 2, 3, 1)).transpose(1, 3).transpose(2, 3)[:, :8, :8],
}


@pytest.mark.parametrize("name", [*PARTS, *ROWS, *OTHERS])
def test_parts_of_images(name: str, chained: list[int]) -> None:
    """As torch does, a convolution answers in the layout of its input."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 16, 3), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second((PARTS | ROWS | OTHERS)[name](self.first(x).relu()))
            return result

    source = settled(Parts())
    optimized = xopt.optimize(source)
    for _ in range(3):
        for x in (torch.randn(2, 4, 10, 10), torch.randn(2, 4, 10, 10).contiguous(memory_format=torch.channels_last)):
            check(source, optimized, x)
            with torch.no_grad():
                assert name not in PARTS or optimized(x).stride() == source(x).stride()
    assert name in OTHERS or all(length > 2 for length in chained)


def test_a_split_of_normed_channels(chained: list[int]) -> None:
    """How many parts there are is known of all calls (Res2Net)."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Conv2d(4, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(8, 8, 1)
            self.pool = nn.MaxPool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            one, other = torch.split(self.pool(self.norm(self.first(x)).relu()), 8, 1)
            return torch.cat([self.second(one), other], 1)

    source = settled(Split())
    optimized = xopt.optimize(source)
    for size in (10, 10, 6):
        check(source, optimized, torch.randn(2, 4, size, size))
    assert len(chained) == 3
    assert set(chained) == {6}


@pytest.mark.parametrize("spread", ["of the image", "of its activation", "of another"])
def test_attention_of_channels(spread: str, chained: list[int]) -> None:
    """A convolution over channels, as an image of one, and a gate that is spread before it is multiplied (ECA)."""

    class Eca(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 8, 1)
            self.channels = nn.Conv1d(1, 1, 3, padding=1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            gate = self.channels(x.mean((2, 3)).view(x.shape[0], 1, -1)).sigmoid().view(x.shape[0], -1, 1, 1)
            if spread == "of another":
                return self.last(x + gate.expand_as(x)[:, :, :1])  # type: ignore[no-any-return]
            y = functional.silu(x) if spread == "of its activation" else x
            return self.last(y * gate.expand_as(x))  # type: ignore[no-any-return]

    source = settled(Eca())
    optimized = xopt.optimize(source)
    for size in (10, 10, 6):
        check(source, optimized, torch.randn(2, 4, size, size))
    assert spread == "of another" or (len(chained) == 3 and len(set(chained)) == 1)


@pytest.mark.parametrize("given", ["size", "factor", "factors"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_interpolation_between(mode: str, given: str, chained: list[int]) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            gate = self.second(x).sigmoid()
            whole = self.first(x)
            sizes: dict[str, Any] = {
                "size": {"size": whole.shape[-2:]},
                "factor": {"scale_factor": 2},
                "factors": {"scale_factor": (2.0, 2)},
            }
            result: Tensor = whole * functional.interpolate(gate, mode=mode, **sizes[given])
            return result

    source = settled(Gated())
    optimized = xopt.optimize(source)
    for size in (10, 10, 6, 14, 6):
        check(source, optimized, torch.randn(2, 4, size, size))
    assert len(chained) == 5
    assert len(set(chained)) == 1
