"""What a model answers in: tensors of the source's dtype, in whatever containers they come."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt


class Named(NamedTuple):
    y: Tensor


@dataclass
class Fields:
    y: Tensor
    others: list[Tensor] = field(default_factory=list)
    name: str = "fields"


@dataclass(frozen=True)
class Frozen:
    y: Tensor


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], list[Tensor]]]] = {
    "tensor": (lambda y: y, lambda result: [result]),
    "tuple": (lambda y: (y, y.sum()), list),
    "list": (lambda y: [y, [y]], lambda result: [result[0], *result[1]]),
    "dict": (lambda y: {"a": {"b": y}}, lambda result: [result["a"]["b"]]),
    "ordered dict": (lambda y: collections.OrderedDict(a=y), lambda result: [result["a"]]),
    "set": (lambda y: {y}, list),
    "named tuple": (Named, lambda result: [result.y]),
    "dataclass": (lambda y: Fields(y, [y]), lambda result: [result.y, *result.others]),
    "frozen dataclass": (Frozen, lambda result: [result.y]),
}


class Answers(nn.Module):
    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.answer = answer
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        self.kept = self.answer(self.second(functional.gelu(self.first(x))))
        return self.kept


@pytest.mark.parametrize("name", CONTAINERS)
def test_results_have_the_dtype_of_the_source(name: str) -> None:
    answer, tensors = CONTAINERS[name]
    source = Answers(answer).eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    x = torch.randn(3, 8)
    for _ in range(3):
        with torch.no_grad():
            expected, got = source(x), optimized(x)
        assert type(got) is type(expected)
        assert [each.dtype for each in tensors(got)] == [torch.float32] * len(tensors(expected))
        for ours, theirs in zip(tensors(got), tensors(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
