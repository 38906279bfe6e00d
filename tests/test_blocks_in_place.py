"""What forwards change in place by functions, or have written to a tensor that they give, is so in programs, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.block_models import Mlp, X

Change = Callable[[Tensor], Any]
IN_PLACE: list[Change] = [
    *(torch.relu_, torch.sigmoid_, torch.tanh_, torch.neg_, torch.exp_, torch.abs_, torch.square_),
    *(functional.relu_, functional.elu_, functional.hardtanh_, functional.selu_),
    *(lambda y: functional.leaky_relu_(y, 0.1), lambda y: torch.clamp_(y, 0.0, 1.0), torch.Tensor.relu_),
    *(lambda y: functional.celu_(y, 0.5), lambda y: torch.Tensor.__iadd__(y, 1)),
    *(lambda y: torch.mul(y, y, out=y), lambda y: torch.clamp(y, min=0.0, out=y)),
    lambda y: torch.neg(y, out=y),
]


class SeenBefore(Mlp):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        view = y[..., :64]
        self.change(y)
        return self.down(y) + view  # type: ignore[no-any-return]


class UsedLater(SeenBefore):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(functional.gelu(self.up(x)))
        z = self.up(y)
        self.change(y)
        return self.down(z) + y  # type: ignore[no-any-return]


class Returned(SeenBefore):
    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        return self.down(self.change(y)), y


class Given(SeenBefore):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        self.change(y.view(-1, 64))
        return super(SeenBefore, self).forward(y)


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("kind", [SeenBefore, UsedLater, Returned, Given])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_is_changed_in_place(kind: type[SeenBefore], change: Change) -> None:
    source = nn.Sequential(kind(change)).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    source = copy.deepcopy(source)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for x in (X, X[:1], X):
                torch.testing.assert_close(optimized(x), source(x))


def test_an_activation_in_place_by_function_is_fused() -> None:
    class Activated(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu_(self.up(x)))  # type: ignore[no-any-return]

    model = xopt.optimize(nn.Sequential(Activated()).eval(), dtype=torch.float32)
    with torch.no_grad():
        model(X)
    assert "linear+relu" in xopt.report(model).fusions[0].fused


class Accumulates(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.tensor(0.0)
        total += x.sum()
        return super().forward(x) * total


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_constant_that_is_changed_in_place_begins_anew_in_each_call(context: Any) -> None:
    source = nn.Sequential(Accumulates()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    source = copy.deepcopy(source)
    with context():
        for _ in range(3):
            torch.testing.assert_close(optimized(X), source(X))
