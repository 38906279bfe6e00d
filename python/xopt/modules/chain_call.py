"""Whether the calls of a chain fit the shapes that come: what no operator looks at, since torch would do otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from xopt.ops.chain import Given, Result

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


class Fitting:
    """Whether calls find what they have to, by the shapes of a chain's values: what is added has to have the shape of
    what it is added to."""

    def __init__(self, calls: list[Call], operands: dict[Value, Shape]) -> None:
        self._calls = calls
        self._operands = operands
        self._taken = [frozenset((call.input, *call.others, call.alike)) for call in calls]
        self._known: dict[tuple[torch.Size, ...], bool] = {}
        self._last: tuple[tuple[torch.Size, ...], list[Shapes]] | None = None
        """The last shapes that it held for, and those that the calls then gave."""

    def holds(self, shapes: tuple[torch.Size, ...]) -> bool:
        known = self._known.get(shapes)
        if known is None:
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            known = self._known[shapes] = self._look(shapes)
        return known

    def _look(self, shapes: tuple[torch.Size, ...]) -> bool:
        """Where but some shapes are others than last time (a cache grows), looks at calls that see a difference."""
        before, results = self._last or (None, [((), ())] * len(self._calls))
        results = list(results)  # others may look at the same time
        changed: set[Value | None] = set()
        if before is not None:
            changed.update(Given(place) for place, each in enumerate(shapes) if each != before[place])
        for number, taken in enumerate(self._taken):
            if before is not None and changed.isdisjoint(taken):
                continue
            gives = self._look_at(number, shapes, results)
            if gives is None:
                return False
            changed.update(Result(number, part) for part in (0, 1) if gives[part] != results[number][part])
            results[number] = gives
        self._last = shapes, results
        return True

    def _look_at(self, number: int, shapes: tuple[torch.Size, ...], results: list[Shapes]) -> Shapes | None:
        """The shapes of a call's results; None: it does not fit."""

        def shape_of(value: Value) -> Shape:
            if isinstance(value, Result):
                return results[value.number][value.part]
            return self._operands[value] if value in self._operands else tuple(shapes[value.place])

        call = self._calls[number]
        taken = [shape_of(value) for value in (call.input, *call.others)]
        if call.fits is not None and not call.fits(*taken):
            return None
        result = call.shape(*taken)
        fits = call.alike is None or shape_of(call.alike) == result
        return (result, result if call.second is None else call.second(*taken)) if fits else None
