"""Whether the calls of a chain fit the shapes that come: what no operator looks at, since torch would do otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from xopt.graph.steps import OtherSizes
from xopt.ops.chain import Given, Number, Result, number_of

Value = Given | Result
Shape = tuple[int, ...]
Shapes = tuple[Shape, Shape]  # of the results of a call, of which it may have but the first
_MOST_SHAPES = 64  # that a chain remembers


class Call(NamedTuple):
    """What a step is as an operator's call."""

    op: str
    arguments: tuple[Any, ...]
    """In the order of its schema: constants, what `Seen` gave, and values of the chain."""
    input: Value
    shape: Callable[..., Shape]
    """The result's, by those of the input and the others. It must not hold the module, whose program holds it."""
    image_dims: int | None = None
    """How many dimensions the input has to have (or ANY_DIMS); its channels have to be last in memory, unless:"""
    any_layout: bool | None = False
    """None: where `channels_last` says so."""
    alike: Value | None = None
    """What has to have the shape of the result."""
    others: tuple[Value, ...] = ()
    """Those whose shapes say, beside the input's, what the result's is."""
    second: Callable[..., Shape] | None = None
    """The shape of a second result, where it is not that of the first."""
    fits: Callable[..., bool] | None = None
    """Whether the operator takes input and others of these shapes."""


class Expected(NamedTuple):
    """What comparing two numbers has to say in each call."""

    place: int
    """How many calls are before it."""
    function: Callable[[Any, Any], Any]
    left: Number
    right: Number
    outcome: Any


class Fitting:
    """Whether calls find what they have to, by the shapes of a chain's values: what is added has to have the shape of
    what it is added to. And whether sizes are as expected."""

    def __init__(self, calls: list[Call], operands: dict[Value, Shape], expected: list[Expected]) -> None:
        self._calls = calls
        self._operands = operands
        self._taken = [frozenset((call.input, *call.others, call.alike)) for call in calls]
        self._expected: list[list[Expected]] = [[] for _ in range(len(calls) + 1)]
        for each in expected:
            self._expected[each.place].append(each)
        self._known: dict[tuple[torch.Size, ...], bool | None] = {}
        """None: sizes are not as expected."""
        self._last: tuple[tuple[torch.Size, ...], list[Shapes]] | None = None
        """The last shapes that it held for, and those that the calls then gave."""

    def holds(self, shapes: tuple[torch.Size, ...]) -> bool:
        """Raises OtherSizes where those are not as expected."""
        try:
            known = self._known[shapes]
        except KeyError:
            known = self._look(shapes)
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[shapes] = known
        if known is None:
            raise OtherSizes
        return known

    def _look(self, shapes: tuple[torch.Size, ...]) -> bool | None:
        """Where but some shapes are others than last time (a cache grows), looks at calls that see a difference."""
        before, results = self._last or (None, [((), ())] * len(self._calls))
        results = list(results)  # others may look at the same time
        changed: set[Value | None] = set()
        if before is not None:
            changed.update(Given(place) for place, each in enumerate(shapes) if each != before[place])
        for number, taken in enumerate((*self._taken, frozenset())):
            if not all(self._is_expected(each, shapes, results) for each in self._expected[number]):
                return None
            if (before is not None and changed.isdisjoint(taken)) or number == len(self._calls):
                continue
            gives = self._look_at(number, shapes, results)
            if gives is None:
                return False
            changed.update(Result(number, part) for part in (0, 1) if gives[part] != results[number][part])
            results[number] = gives
        self._last = shapes, results
        return True

    def _shape_of(self, value: Value, shapes: tuple[torch.Size, ...], results: list[Shapes]) -> Shape:
        if isinstance(value, Result):
            return results[value.number][value.part]
        return self._operands[value] if value in self._operands else tuple(shapes[value.place])

    def _is_expected(self, expected: Expected, shapes: tuple[torch.Size, ...], results: list[Shapes]) -> bool:
        def size(value: Value, dim: int) -> int:
            return self._shape_of(value, shapes, results)[dim]

        left, right = (number_of(each, size) for each in (expected.left, expected.right))
        return bool(expected.function(left, right) == expected.outcome)

    def _look_at(self, number: int, shapes: tuple[torch.Size, ...], results: list[Shapes]) -> Shapes | None:
        """The shapes of a call's results; None: it does not fit."""

        def shape_of(value: Value) -> Shape:
            return self._shape_of(value, shapes, results)

        call = self._calls[number]
        taken = [shape_of(value) for value in (call.input, *call.others)]
        if call.fits is not None and not call.fits(*taken):
            return None
        result = call.shape(*taken)
        fits = call.alike is None or shape_of(call.alike) == result
        return (result, result if call.second is None else call.second(*taken)) if fits else None
