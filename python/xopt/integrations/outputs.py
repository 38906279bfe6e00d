"""What models of transformers and diffusers answer in: dictionaries that are data classes, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from xopt.graph.symbol import CannotRecord, NamedResult


def _items(output: Any) -> dict[str, Any]:
    if vars(output).keys() - {field.name for field in fields(output)}:
        raise CannotRecord(f"its {type(output).__name__} has attributes of its own")
    return dict(output)


def _maker(output: Any, named: dict[str, Any]) -> Callable[..., Any]:
    """Makes an output as its class does, but for looking at all fields again for each that is set: that takes 10 us,
    and with cold caches 20, after each call of a model. The class itself where that is not the same."""
    kind: Any = type(output)
    defaults = {field.name: field.default for field in fields(kind)}

    def make(**named: Any) -> Any:
        made = kind.__new__(kind)
        attributes = vars(made)
        attributes.update(defaults)
        attributes.update(named)
        for name, value in named.items():
            OrderedDict.__setitem__(made, name, value)
        return made

    make.__name__ = kind.__name__
    return make if _are_same(kind(**named), make(**named)) else kind


def _are_same(one: Any, other: Any) -> bool:
    def parts(output: Any) -> list[Any]:
        return [*vars(output), *map(id, vars(output).values()), *output.keys(), *map(id, output.values())]

    return parts(one) == parts(other)


OUTPUT = NamedResult(_items, _maker)
