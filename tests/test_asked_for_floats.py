"""Products that a forward asks for in fp32, by casts of its own, in a model that was optimized to bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt

WIDTH = 48


class Router(nn.Module):
    """As mixtures of experts have them: scores in fp32 of activations that are bf16."""

    def __init__(self, recorded: bool, cast: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(8, WIDTH))
        self.recorded, self.cast = recorded, cast

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        if not self.recorded and float(y.sum()) > 1e9:
            return y
        if self.cast == "none":
            return functional.linear(y, self.weight)
        wide = {"float": y.float, "to": lambda: y.to(torch.float32), "type": lambda: y.type(torch.float32)}[self.cast]()
        return functional.linear(wide, self.weight.type(torch.float32)) * 3


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("cast", ["float", "to", "type", "none"])
@torch.no_grad()
def test_scores_are_those_of_a_model_of_bf16(cast: str, recorded: bool) -> None:
    torch.manual_seed(0)
    source = Router(recorded, cast).eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    for rows in (5, 1, 5):
        x = torch.randn(2, rows, WIDTH)
        weight, bias = optimized.first.weight.float(), optimized.first.bias.float()
        inside = torch.relu(functional.linear(x.bfloat16().float(), weight, bias))
        inside = inside if recorded and cast != "none" else inside.bfloat16().float()  # fused, the cast rounds nothing
        exact = functional.linear(inside, source.weight) * (1 if cast == "none" else 3)
        got = optimized(x)
        assert got.dtype == torch.float32
        error = float((got - exact).norm() / exact.norm())
        assert error < 5e-4 if cast != "none" else 1e-3 < error < 1e-2, error
    assert bool(xopt.report(optimized).fusions[0].fused) == recorded


@torch.no_grad()
def test_the_users_own_autocast_decides() -> None:
    torch.manual_seed(0)
    source = Router(recorded=False, cast="float").eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    x = torch.randn(2, 5, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = source(x), optimized(x)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=0.1, rtol=0.05)


class TwicePaired(nn.Module):
    """One layer is in two gated pairs, of which only one can be packed as a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.third(x) * functional.silu(self.first(x)), self.second(x) * functional.silu(self.first(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_pairs_that_are_not_packed_as_such_have_the_sources_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, x = TwicePaired().eval(), torch.randn(2, 5, WIDTH)
    optimized = xopt.optimize(source, dtype=dtype)
    for _ in range(2):
        for got, exact in zip(optimized(x), source(x), strict=True):
            assert got.dtype == torch.float32
            assert (got - exact).norm() < 1e-2 * exact.norm()
