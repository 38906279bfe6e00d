"""Rows divided by their length, where a forward calls torch for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.test_chain_programs import lengths_of_chains
from tests.test_optimize_conv import fused_in


class Normalizes(nn.Module):
    def __init__(self, normalize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.normalize = nn.Linear(24, 48), nn.Linear(48, 8), normalize

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.normalize(self.first(x)))  # type: ignore[no-any-return]


FOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda x: functional.normalize(x, dim=-1),
    "by its number": lambda x: functional.normalize(x, 2.0, 2, 0.5),
    "heads": lambda x: (
        functional.normalize(x.unflatten(-1, (4, 12)).transpose(1, 2), dim=-1).transpose(1, 2).flatten(2)
    ),
    "rows in columns": lambda x: functional.normalize(x.transpose(1, 2), dim=-1).transpose(1, 2),
    "of nothing": lambda x: functional.normalize(x * 0.0, p=2, dim=-1),
}
LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "another dimension": lambda x: functional.normalize(x, dim=1),
    "another norm": lambda x: functional.normalize(x, p=1.0, dim=-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*FOUND, *LEFT])
@torch.no_grad()
def test_blocks(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Normalizes((FOUND | LEFT)[name]).eval()
    optimized = xopt.optimize(copy.deepcopy(source), dtype=dtype)
    reference = copy.deepcopy(source).double()
    lengths = lengths_of_chains(monkeypatch)
    for rows in (5, 1, 7):
        x = torch.randn(3, rows, 24)
        result, expected = optimized(x), reference(x.double())
        allowed = 1e-6 if dtype == torch.float32 else 1.1 * error_of(copy.deepcopy(source).to(dtype), x, expected)
        assert (result - expected).norm() <= allowed * expected.norm()
    assert ("unit_norm" in fused_in(optimized)) == (name in FOUND)
    assert len(lengths) == (3 if name in FOUND else 0)


def error_of(model: Any, x: Tensor, expected: Tensor) -> float:
    dtype = next(model.parameters()).dtype
    return float((model(x.to(dtype)).double() - expected).norm() / expected.norm())


def test_a_gradient_passes() -> None:
    source = Normalizes(FOUND["last"]).eval()
    optimized = xopt.optimize(copy.deepcopy(source))
    inputs = [torch.ones(2, 3, 24, requires_grad=True) for _ in range(2)]
    for model, x in zip((source, optimized), inputs, strict=True):
        model(x).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
