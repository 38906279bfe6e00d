"""Optimized convolutions on padding modes and inputs of all kinds, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.test_optimize_conv import fused_in


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, 2, (1, 3), "same", "valid"])
def test_padding_modes(mode: str, padding: Any) -> None:
    kinds: list[tuple[Any, tuple[int, ...]]] = [(nn.Conv1d, (17,)), (nn.Conv2d, (9, 12)), (nn.Conv3d, (7, 6, 8))]
    for kind, size in kinds:
        if isinstance(padding, tuple) and len(size) != 2:
            continue
        if kind is nn.Conv3d and mode == "reflect" and padding == "same":
            continue
        source = kind(4, 6, (4, 3, 2)[: len(size)], padding=padding, padding_mode=mode, dilation=1).eval()
        x = torch.randn(2, 4, *size)
        model = xopt.optimize(source)
        with torch.no_grad():
            assert torch.allclose(model(x), source(x), atol=1e-5), kind
            assert torch.allclose(model(x[0]), source(x[0]), atol=1e-5), kind
            assert model(x).is_contiguous()


def test_unusual_inputs() -> None:
    source = nn.Conv2d(6, 8, 3, padding=1).eval()
    model = xopt.optimize(source)
    wide = torch.randn(2, 12, 9, 9)
    for x in (
        wide[:, 3:9],
        wide[:1, ::2].expand(3, 6, 9, 9),
        wide[:0, :6],
        wide[:, :6, ::2],
        wide[:, :6].transpose(2, 3),
    ):
        with torch.no_grad():
            result, expected = model(x), source(x)
        assert result.shape == expected.shape
        assert torch.allclose(result, expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="expected 6 channels"):
        model(torch.randn(1, 7, 5, 5))
    with pytest.raises(RuntimeError, match="expected at least 3 elements"):
        xopt.optimize(nn.Conv2d(6, 8, 3).eval())(torch.randn(1, 6, 2, 2))
    with pytest.raises(RuntimeError):
        model(torch.randn(6, 6))


def test_residual_that_is_broadcast_in_a_later_call() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.relu(self.conv(x) + y)

    source = Add().eval()
    model, x = xopt.optimize(source), torch.randn(2, 3, 6, 6)
    for shape in ((2, 4, 4, 4), (1, 4, 1, 1), (2, 4, 4, 1)):
        y = torch.randn(shape)
        with torch.no_grad():
            assert torch.allclose(model(x, y), source(x, y), atol=1e-5)
    assert fused_in(model) == ["conv+add+relu"]
