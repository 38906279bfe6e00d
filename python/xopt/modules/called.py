"""Functions that forwards call by a name of their own module, done by xopt's operators.

No such module is patched: a block runs a copy of its forward, which finds other functions under these names. Everything
else is looked up where the forward looks it up. What takes a function's calls stands beside the operator, or with the
library whose function it is, and is found by its mark.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple, TypeVar

from xopt.graph.names import SubstitutedNames

Substitute = TypeVar("Substitute", bound=Callable[..., Any])


Fits = Callable[[Any, Callable[..., Any]], bool]


class _Called(NamedTuple):
    substitute: Callable[..., Any]
    switch: str
    fits: Fits


_called: dict[str, _Called] = {}


def in_place_of_named(*names: str, switch: str, fits: Fits) -> Callable[[Substitute], Substitute]:
    """Marks what takes the calls of functions with these names, which it gets as its first argument. `fits`: whether a
    function is one that the substitute may stand for. `switch`: the name in `Config` that turns it off."""

    def mark(substitute: Substitute) -> Substitute:
        _called.update(dict.fromkeys(names, _Called(substitute, switch, fits)))
        return substitute

    return mark


class Own(NamedTuple):
    """A forward that finds substitutes, and the switches that turn them off."""

    forward: Callable[..., Any]
    switches: frozenset[str]


def with_substitutes(forward: Callable[..., Any]) -> Own | None:
    """None: it calls no function that has a substitute."""
    switches: set[str] = set()
    copy = _copied(forward, switches)
    return None if copy is forward else Own(copy, frozenset(switches))


def _copied(function: Any, switches: set[str]) -> Any:
    """The function, if neither it nor what it wraps calls any; else a copy."""
    if not isinstance(function, FunctionType):
        return function
    found: dict[str, tuple[Any, Callable[..., Any]]] = {}
    for name in function.__code__.co_names:
        given = function.__globals__.get(name)
        called = _called.get(getattr(given, "__name__", ""))
        if called is not None and called.fits(given, called.substitute):
            found[name] = given, functools.partial(called.substitute, given)
            switches.add(called.switch)
    wrapped = getattr(function, "__wrapped__", None)
    inside = None if wrapped is None else _copied(wrapped, switches)
    if not found and inside is wrapped:
        return function
    cells = tuple(CellType(inside) if _is_filled_with(cell, wrapped) else cell for cell in function.__closure__ or ())
    names = SubstitutedNames(function.__globals__, found) if found else function.__globals__
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _is_filled_with(cell: CellType, function: Any) -> bool:
    try:
        return function is not None and cell.cell_contents is function
    except ValueError:  # it is empty
        return False
