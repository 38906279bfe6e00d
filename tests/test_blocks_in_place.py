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


def add_to_a_part_of_a_sum(y: Tensor) -> Tensor:
    """As GhostNet adds its shortcut to the channels that it keeps."""
    part = torch.cat([y, y], -1)[..., 10:74]
    part += y
    return part


def write_a_part(y: Tensor) -> Tensor:
    """As MViT adds relative positions to scores, but for the class token's."""
    scores = y @ y.transpose(-2, -1)
    scores[:, 1:, 1:] = scores[:, 1:, 1:].reshape(-1, 1).view(scores.shape[0], scores.shape[1] - 1, -1) + 0.5
    return scores.softmax(-1) @ y


def write_by_a_view(y: Tensor) -> Tensor:
    total = y + 1
    total[:, 0].mul_(2.0)
    return total


def write_behind_a_cast(y: Tensor) -> Tensor:
    """As CogView4 turns the queries of its image, but not those of its text."""
    scaled = (y + 1).to(y.dtype)
    scaled[:, 1:] = scaled[:, 1:] * 2
    return scaled


def write_into_what_was_stacked(y: Tensor) -> Tensor:
    """As LTX scales the places of its patches."""
    places = torch.stack([y, y.neg()], dim=1).repeat(1, 1, 1, 1)
    places[:, :1] = places[:, :1] * 0.5
    return places.sum(1)


def read_behind_a_cast_later(y: Tensor) -> Tensor:
    total = y + 1
    same = total.to(y.dtype)
    same[:, :1] = same[:, :1] * 3
    return total + same


def read_the_whole_later(y: Tensor) -> Tensor:
    total = y + 1
    part = total[:, :1]
    part += 1
    return total * part


def read_another_part_later(y: Tensor) -> Tensor:
    total = y + 1
    part, other = total[:, :1], total[..., 3:4]
    part *= 3
    return part + other


def write_what_was_given(y: Tensor) -> Tensor:
    part = y[:, :1]
    part *= 3
    return part + y


def write_parts_of_two(y: Tensor) -> Tensor:
    return write_a_part(y) * add_to_a_part_of_a_sum(y)


def write_what_was_given_behind_a_cast(y: Tensor) -> Tensor:
    return write_what_was_given(y.to(y.dtype))


RECORDED = (add_to_a_part_of_a_sum, write_a_part, write_parts_of_two, write_behind_a_cast, write_into_what_was_stacked)
OTHERS = (
    *(read_the_whole_later, read_another_part_later, write_by_a_view, read_behind_a_cast_later),
    write_what_was_given_behind_a_cast,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("place", range(5))
def test_parts_that_are_changed_in_place(place: int, is_recorded: bool, dtype: torch.dtype) -> None:
    change = (RECORDED if is_recorded else OTHERS)[place]

    class Changes(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(change(self.down(self.up(x))))

    source = nn.Sequential(Changes()).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    with torch.no_grad():
        for x in (X, X, X[:1], X[:, :3]):
            given = x.clone()
            result, exact = optimized(given), source(x)
            assert float((result - exact).norm() / exact.norm()) < (1e-5 if dtype == torch.float32 else 3e-2)
            assert torch.equal(given, x)
    assert bool(xopt.report(optimized).fusions[0].fused) == is_recorded


@pytest.mark.parametrize("is_cast", [False, True])
def test_a_part_of_what_was_given_is_changed_there(is_cast: bool) -> None:
    class Changes(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((write_what_was_given_behind_a_cast if is_cast else write_what_was_given)(x))

    source = nn.Sequential(Changes()).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            one, other = X.clone(), X.clone()
            torch.testing.assert_close(optimized(one), source(other))
            assert torch.equal(one, other)
