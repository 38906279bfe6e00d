"""What kind of call a block gets: the part of its arguments that a recorded graph takes for granted.

Tensors count by dtype, number of dimensions and whether they are on the CPU, what never changes (numbers, flags, None,
members of an Enum, classes, functions of modules) by value, other objects by class, and by what of their state
`opaque_states` names. Sizes do not count: a graph is recorded once for all
of them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from types import BuiltinFunctionType, EllipsisType, FunctionType, ModuleType
from typing import Any

import torch

_CONSTANTS = frozenset(
    {
        *(type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size),
        *(complex, bytes, range, EllipsisType, torch.layout, torch.memory_format),
    }
)
DICTS = (dict, OrderedDict)
"""Whose items, in their order, are looked into."""
TENSORS: set[type] = {torch.Tensor, torch.nn.Parameter}
"""Whose memory is plain. Modules add to it."""
# By class: what of an object a recorded graph takes for granted, hashable. Integrations fill it.
opaque_states: dict[type, Callable[[Any], Any]] = {}


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """A hashable key, and the values that are no part of it, in order."""
    values: list[Any] = []
    key: list[Any] = [  # written out: with cold caches a function takes longer than what it would ask
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.get_autocast_dtype("xpu") if torch.is_autocast_enabled("xpu") else None,
    ]
    for value in args:
        _flatten(value, key, values)
    for name, value in kwargs.items():
        key.append(name)
        _flatten(value, key, values)
    return tuple(key), values


def _flatten(value: Any, key: list[Any], values: list[Any]) -> None:
    kind = type(value)
    if kind in TENSORS:
        key.append((value.dtype, value.ndim, value.layout, value.is_cpu))
        values.append(value)
    elif kind in _CONSTANTS:
        key.append((kind, value))
    elif kind is tuple or kind is list:
        key.append((kind, len(value)))
        for item in value:
            _flatten(item, key, values)
    elif kind in DICTS:
        key.append((kind, tuple(value)))
        for item in value.values():
            _flatten(item, key, values)
    elif _is_constant(value):
        key.append((kind, value))
    else:
        key.append((kind, opaque_states[kind](value)) if kind in opaque_states else kind)
        values.append(value)


def _is_constant(value: Any) -> bool:
    """Whether an object is always this one, and forwards ask which. Functions that others make, and methods, may be new
    in each call."""
    kind = type(value)
    if kind is FunctionType:
        return "<" not in value.__qualname__
    if kind is BuiltinFunctionType:
        return value.__self__ is None or isinstance(value.__self__, (type, ModuleType))
    return isinstance(value, (Enum, type))


def fill(value: Any, values: list[Any]) -> Any:
    """The same arguments with what `signature` took out replaced by the given values, taken from the front."""
    kind = type(value)
    if kind in _CONSTANTS:
        return value
    if kind is tuple or kind is list:
        return kind(fill(item, values) for item in value)
    if kind in DICTS:
        return kind((name, fill(item, values)) for name, item in value.items())
    if _is_constant(value):
        return value
    return values.pop(0)


def is_tensor(value: Any) -> bool:
    return type(value) in TENSORS


_FIRST_NAMES = (("input", "other"), ("query", "key", "value"))
"""Of the arguments that functions of torch begin with."""


def by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of torch's whose first ones are given by their names (diffusers' attention), as those who
    look for a function's calls expect them."""
    if args or "condition" in kwargs:  # torch.where begins with that
        return args, kwargs
    for names in _FIRST_NAMES:
        found = tuple(itertools.takewhile(kwargs.__contains__, names))
        if found:
            rest = {name: value for name, value in kwargs.items() if name not in found}
            return tuple([kwargs[name] for name in found]), rest
    return args, kwargs
