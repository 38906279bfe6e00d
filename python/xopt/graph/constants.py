"""Tensors that a forward makes of numbers alone, for as long as it is recorded.

They are no symbols: a function that makes one may keep it for other calls. Where one meets a symbol, it has a step of
its own after all, which makes it anew in each call, as long as it still is what it was made as.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from xopt.graph.signature import DICTS

_PLAIN = (
    type(None),
    type(Ellipsis),
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_MOST_VALUES = 256  # that a call may have, which a program has written out


class Made(NamedTuple):
    tensor: torch.Tensor
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Constants:
    def __init__(self) -> None:
        self._made: dict[int, Made] = {}

    def note(self, result: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a function has given, or each part of it. What it has only changed, or left as it was, is known."""
        values = list(values_in((args, kwargs)))
        uninitialized = "empty" in getattr(function, "__name__", "")
        if len(values) > _MOST_VALUES or not all(map(_is_plain, values)) or uninitialized:
            return
        if type(result) in (tuple, list):
            made = [Made(part, part_of, (place, function, *args), kwargs) for place, part in enumerate(result)]
        else:
            made = [Made(result, function, args, kwargs)]
        for each in made:
            if type(each.tensor) is torch.Tensor and not any(value is each.tensor for value in values):
                self._made[id(each.tensor)] = each

    def find(self, tensor: torch.Tensor) -> Made | None:
        return self._made.get(id(tensor))

    def is_of_numbers(self, tensor: torch.Tensor) -> bool:
        """Whether it goes back to numbers, and not to a tensor that is there in other calls, too."""
        made = self.find(tensor)
        if made is None:
            return False
        return all(
            self.is_of_numbers(each) for each in values_in((made.args, made.kwargs)) if type(each) is torch.Tensor
        )

    def clear(self) -> None:
        self._made.clear()


def part_of(place: int, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    part: torch.Tensor = function(*args, **kwargs)[place]
    return part


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def values_in(value: Any) -> Iterator[Any]:
    """All that is in a value and plain containers."""
    if type(value) in (tuple, list, *DICTS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from values_in(item)
    else:
        yield value


def _is_plain(value: Any) -> bool:
    if type(value) is slice:
        return all(type(each) in (type(None), int) for each in (value.start, value.stop, value.step))
    return type(value) in _PLAIN or type(value) is torch.Tensor
