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


class Scores(nn.Module):
    """Attention whose scores a forward wants in fp32, with a column beside them that is in none of the dtypes of the
    rest."""

    def __init__(self, recorded: bool, form: str, autocast_is_off: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.sink = nn.Parameter(torch.randn(1, 1, 1))
        self.recorded, self.form, self.autocast_is_off = recorded, form, autocast_is_off

    def product(self, x: Tensor) -> Tensor:
        left, right = x.float(), x.transpose(1, 2).float()
        if self.form == "baddbmm":
            return torch.baddbmm(torch.zeros(1), left, right)
        return torch.einsum("bik,bkj->bij", left, right) if self.form == "einsum" else left @ right

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        if not self.recorded and float(y.sum()) > 1e9:
            return y
        if self.autocast_is_off:
            with torch.autocast("cpu", enabled=False):
                scores = self.product(y) * 0.5
        else:
            scores = self.product(y) * 0.5
        return torch.cat([scores, self.sink.float().expand(*scores.shape[:-1], 1)], dim=-1).softmax(-1)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("form", "autocast_is_off"), [("@", True), ("@", False), ("einsum", True), ("baddbmm", True), ("einsum", False)]
)
@torch.no_grad()
def test_products_of_activations(form: str, autocast_is_off: bool, recorded: bool) -> None:
    torch.manual_seed(0)
    source = Scores(recorded, form, autocast_is_off).eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    for rows in (5, 7, 5):
        x = torch.randn(2, rows, WIDTH)
        y = torch.relu(functional.linear(x.bfloat16().float(), *map(Tensor.float, optimized.first.parameters())))
        got = optimized(x)
        errors = []
        for inside in (y, y.bfloat16().float()):  # a cast that the layer takes along rounds nothing
            scores = inside @ inside.transpose(1, 2) * 0.5
            scores = torch.cat([scores, optimized.sink.float().expand(2, rows, 1)], dim=-1)
            errors.append(float((got - scores.softmax(-1)).abs().max()))
        assert min(errors) < 2e-4, errors
