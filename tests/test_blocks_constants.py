"""Tensors that forwards make of numbers are made in programs as well, unless they are no longer what they were."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.block_models import Mlp, X


class Scaled(Mlp):
    def __init__(self, make: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make
        self.plain, self.scalar = torch.full((64,), 2.0), torch.tensor(2.0)  # no buffers

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.make(self, x)


def changed_after_it_was_used(module: Any, x: Tensor) -> Tensor:
    factor, shift = torch.tensor(2.0), torch.tensor([3.0])
    y = x * factor + shift
    factor += 1
    return y * factor


MADE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "numbers": lambda module, x: torch.tensor([float(each) for each in range(64)]),
    "a view": lambda module, x: torch.tensor([1.0, 2.0]).repeat(32).view(1, -1) * 2,
    "a range": lambda module, x: torch.arange(64).float(),
    "one number": lambda module, x: torch.full((1,), float(x.shape[0])),
    "by sizes": lambda module, x: torch.eye(x.shape[1], 64),
    "changed, a number": changed_after_it_was_used,
    "parts": lambda module, x: torch.arange(128.0).chunk(2)[1] + torch.meshgrid(torch.arange(64), indexing="ij")[0],
    "parts of a parameter": lambda module, x: module.up.bias.split(64)[0] + module.up.weight.unbind(0)[2],
}
NOT_MADE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "random": lambda module, x: torch.rand(64),
    "too many": lambda module, x: torch.tensor([[0.5] * 64] * 5),
    "changed": lambda module, x: functools.reduce(lambda made, each: made.add_(each), range(3), torch.zeros(64)),
    "a part of it changed": lambda module, x: [made := torch.zeros(64), made[3:].fill_(2.0)][0],
}


@pytest.mark.parametrize("name", [*MADE, *NOT_MADE])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_tensors_made_of_numbers(name: str, context: Any) -> None:
    source = nn.Sequential(Scaled((MADE | NOT_MADE)[name])).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    source = copy.deepcopy(source)
    with context():
        for x in (X, X[:1], X[:, :3], X):
            if name == "too many" and x.shape[1] != 5:
                continue
            torch.manual_seed(0)
            expected = source(x)
            torch.manual_seed(0)
            torch.testing.assert_close(optimized(x), expected)
    assert bool(xopt.report(optimized).fusions[0].fused) == (name in MADE)


@pytest.mark.parametrize(
    "part",
    [
        *(lambda module, x: module.plain[3], lambda module, x: module.plain * 2),
        *(lambda module, x: module.plain[3] * 2, lambda module, x: module.plain.sum() + module.scalar),
        *(lambda module, x: module.scalar, lambda module, x: module.scalar * 2),
    ],
)
def test_an_attribute_that_is_no_buffer_is_followed(part: Any) -> None:
    source = Scaled(part).eval()
    optimized: Any = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)
    source = copy.deepcopy(source)
    with torch.no_grad():
        for value in (2.0, 3.0, 4.0):
            for model in (optimized[0], source):
                model.plain.fill_(value)
                model.scalar.fill_(value)
            torch.testing.assert_close(optimized(X), source(X))
        for model in (optimized[0], source):
            model.plain, model.scalar = torch.full((64,), 5.0), torch.tensor(6.0)
        torch.testing.assert_close(optimized(X), source(X))


def count(module: Any, x: Tensor) -> Any:
    module.plain += 1
    return module.plain


def count_a_view(module: Any, x: Tensor) -> Tensor:
    module.plain[3:].add_(1)
    return torch.zeros(64)


def count_a_number(module: Any, x: Tensor) -> Tensor:
    torch.add(module.scalar, 1, out=module.scalar)
    return torch.zeros(64)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("part", [count, count_a_view, count_a_number], ids=lambda part: part.__name__)
def test_an_attribute_that_is_no_buffer_is_changed_once_a_call(part: Any, context: Any) -> None:
    with context():
        source = Scaled(part).eval()
        optimized: Any = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)
        source = copy.deepcopy(source)
        for _ in range(4):
            torch.testing.assert_close(optimized(X), source(X))
            assert torch.equal(optimized[0].plain, source.plain)
            assert torch.equal(optimized[0].scalar, source.scalar)


def test_a_container_may_hold_itself() -> None:
    source = Scaled(lambda module, x: module.plain).eval()
    held: dict[str, Any] = {"plain": source.plain}
    held["self"] = [held]
    source.held = held  # type: ignore[assignment]
    optimized = xopt.optimize(nn.Sequential(source).eval(), dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(optimized(X), source(X))
