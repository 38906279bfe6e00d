"""What forwards leave elsewhere than in their results is there after each call, as it is with the source."""

from __future__ import annotations

import collections
import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.block_models import Mlp, X

seen: list[Any] = []
calls = 0


class Box:
    """An object of the user's."""

    count = 0
    tensor: Any = None


class Slotted:
    __slots__ = ("tensor",)


class Writer(Mlp):
    """Calls its second argument with itself, a tensor that it has made, and what it was given."""

    total = 0

    def __init__(self, write: Callable[[Any, Tensor, Any], None]) -> None:
        super().__init__()
        self.write = write
        self.nested: dict[str, list[Any]] = {"seen": []}
        self.lists: list[list[Any]] = [[], []]
        self.box = Box()
        self.slotted = Slotted()
        self.last: collections.deque[Any] = collections.deque(maxlen=2)
        self.by_name: Any = collections.defaultdict(list)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        y = x * 2
        self.write(self, y, given)
        return super().forward(y)


def to_global(writer: Any, y: Tensor, given: Any) -> None:
    seen.append(y)


def to_counter(writer: Any, y: Tensor, given: Any) -> None:
    global calls
    calls += 1


def to_class(writer: Any, y: Tensor, given: Any) -> None:
    type(writer).total = type(writer).total + 1


def to_count(writer: Any, y: Tensor, given: Any) -> None:
    writer.box.count += 1


# By name: what a forward writes, and where that is afterwards.
OWN: dict[str, tuple[Callable[[Any, Tensor, Any], Any], Callable[[Any], Any]]] = {
    "nested": (lambda writer, y, given: writer.nested["seen"].append(y), lambda writer: writer.nested["seen"]),
    "lists": (lambda writer, y, given: writer.lists[0].append(y), lambda writer: writer.lists),
    "object": (lambda writer, y, given: setattr(writer.box, "tensor", y), lambda writer: writer.box.tensor),
    "slot": (lambda writer, y, given: setattr(writer.slotted, "tensor", y), lambda writer: writer.slotted.tensor),
    "deque": (lambda writer, y, given: writer.last.append(y), lambda writer: list(writer.last)),
    "defaultdict": (lambda writer, y, given: writer.by_name["y"].append(y), lambda writer: dict(writer.by_name)),
    "count": (to_count, lambda writer: writer.box.count),
    "class": (to_class, lambda writer: type(writer).total),
    "global": (to_global, lambda writer: list(seen)),
    "global count": (to_counter, lambda writer: calls),
}


@pytest.mark.parametrize("name", OWN)
def test_what_a_forward_writes_is_there_after_each_call(name: str) -> None:
    global calls
    write, written = OWN[name]
    torch.manual_seed(0)
    source = Writer(write).eval()
    optimized: Any = xopt.optimize(copy.deepcopy(nn.Sequential(source)).eval(), dtype=torch.float32)
    inputs = [X, X + 1, X - 1]
    found = []
    for model in (source, optimized):
        calls = Writer.total = 0
        seen.clear()
        with torch.no_grad():
            for x in inputs:
                model(x)
        found.append(written(source if model is source else optimized[0]))
        type(optimized[0]).total = 0
    torch.testing.assert_close(found[1], found[0])
    assert not xopt.report(optimized).fusions[0].fused
    assert xopt.report(optimized).fusions[0].problem


GIVEN: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor, Any], Any]]] = {
    "item of a list": (lambda: [None], lambda writer, y, given: given.__setitem__(0, y)),
    "new item of a list": (list, lambda writer, y, given: given.append(y)),
    "count in a list": (lambda: [0], lambda writer, y, given: given.__setitem__(0, given[0] + 1)),
    "list in a tuple": (lambda: ([],), lambda writer, y, given: given[0].append(y)),
    "dict": (dict, lambda writer, y, given: given.__setitem__("y", y)),
    "object": (Box, lambda writer, y, given: setattr(given, "tensor", y)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_forward_writes_into_its_arguments_is_there_after_each_call(name: str) -> None:
    make, write = GIVEN[name]
    source = Writer(write).eval()
    optimized: Any = xopt.optimize(copy.deepcopy(source), dtype=torch.float32)
    for x in (X, X + 1, X - 1):
        expected, given = make(), make()
        with torch.no_grad():
            torch.testing.assert_close(optimized(x, given), source(x, expected))
        if isinstance(given, Box):
            expected, given = expected.tensor, given.tensor
        torch.testing.assert_close(given, expected)


@functools.lru_cache
def factor(rows: int) -> Tensor:
    return torch.arange(rows).view(-1, 1)


def test_a_cached_function_of_sizes_is_recorded_and_keeps_nothing_of_the_recording() -> None:
    class Cached(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * factor(x.shape[1]))

    factor.cache_clear()
    source = Cached().eval()
    optimized = xopt.optimize(copy.deepcopy(nn.Sequential(source)).eval(), dtype=torch.float32)
    with torch.no_grad():
        for x in (X, X[:, :3], X):
            torch.testing.assert_close(optimized(x), source(x))
    assert "linear+gelu_erf" in xopt.report(optimized).fusions[0].fused
    assert factor.cache_info().currsize == 2  # those of the source's own calls


LIBRARY: dict[str, Any] = {"__name__": "some_library"}
exec("def look_up(x):\n    global table\n    table = table or [x]\n    return x", LIBRARY)
look_up: Any = LIBRARY["look_up"]


@pytest.mark.parametrize("by_torch", [True, False])
def test_a_library_may_fill_its_tables_when_torch_calls_it(by_torch: bool) -> None:
    class Calls(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            two = torch.utils._pytree.tree_map(look_up, [2])[0] if by_torch else look_up(2)
            return super().forward(x * two)

    LIBRARY["table"] = None
    source = Calls().eval()
    optimized = xopt.optimize(copy.deepcopy(nn.Sequential(source)).eval(), dtype=torch.float32)
    with torch.no_grad():
        result = optimized(X)
        torch.testing.assert_close(result, source(X))
    assert LIBRARY["table"] == [2]
    assert bool(xopt.report(optimized).fusions[0].fused) == by_torch


def test_what_is_told_of_garbage_collections_is_not_the_forwards_doing() -> None:
    def count(phase: str, info: dict[str, int]) -> None:
        global calls
        calls += 1

    class Litters(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(1000):  # more than the collector waits for
                cycle: list[Any] = []
                cycle.append(cycle)
            return super().forward(x)

    source = Litters().eval()
    optimized = xopt.optimize(copy.deepcopy(nn.Sequential(source)).eval(), dtype=torch.float32)
    gc.callbacks.append(count)
    try:
        with torch.no_grad():
            torch.testing.assert_close(optimized(X), source(X))
    finally:
        gc.callbacks.remove(count)
    assert "linear+gelu_erf" in xopt.report(optimized).fusions[0].fused
    assert gc.isenabled()


def test_a_list_of_its_own_does_not_keep_a_forward_from_being_recorded() -> None:
    class Collects(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            parts: list[Tensor] = []
            for factor in (1, 2):
                parts.append(super().forward(x * factor))
            return torch.cat(parts)

    source = Collects().eval()
    optimized = xopt.optimize(copy.deepcopy(nn.Sequential(source)).eval(), dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(optimized(X), source(X))
    assert "linear+gelu_erf" in xopt.report(optimized).fusions[0].fused
