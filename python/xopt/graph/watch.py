"""What a recording takes for granted beside the modules' structure: what their attributes are, what plain objects and
containers that these lead to hold, attributes of classes, and globals that forwards name.

Nothing of it is asked for in each call: dictionaries are looked at again only after one has changed, which native code
knows of each (`csrc/bindings/module_guard.h`). Only lists, sets and globals have to be compared.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from xopt import _C
from xopt.graph.held import tensors_in
from xopt.graph.state import Surroundings, attributes, is_of_user, own_classes
from xopt.graph.symbol import CannotRecord

OWN_ATTRIBUTES = frozenset(nn.Module().__dict__) | {"forward"}  # which are asked for by themselves
_COUNT = "num_batches_tracked"
_CONTAINERS = (dict, list, set, deque)
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
_MOST = 50_000


def watch(guard: _C.ModuleGuard, modules: Iterable[tuple[int, nn.Module]], surroundings: Surroundings) -> None:
    """Has the guard of a program see changes of all that the recorded forwards may have read. `modules`: with their
    places."""
    watcher = _Watcher(guard, surroundings.names)
    for place, module in modules:
        held = _of_module(module)
        guard.add_check(place, _Unchanged(_of_module, held))
        watcher.add_named({name: value for name, value in held.items() if not is_compared(value)})
        for value in held.values():
            if issubclass(type(value), _CONTAINERS) and next(tensors_in(value), None) is not None:
                watcher.add(value)  # a recording may read these, whatever way it comes to them
    for names, name, value in surroundings.globals:
        if not (inspect.isroutine(value) or isinstance(value, (type, ModuleType, nn.Module))):
            guard.add_global(names, name, value)
            watcher.add(value)
    for kind in surroundings.classes:
        watcher.add_class(kind)
    watcher.follow()


def is_compared(value: Any) -> bool:
    """Whether a module's attribute is a container that is compared with a copy of it, and not watched."""
    return type(value) in (dict, list, set) and _is_plain(value)


def _is_plain(value: Any, depth: int = 6) -> bool:
    if type(value) is dict:
        value = tuple(value.values())
    if type(value) in (list, tuple, set, frozenset):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return isinstance(value, (type(None), bool, int, float, str, torch.dtype, torch.device, type))


class _Watcher:
    """Goes from object to object, by attributes that forwards name: a model may lead to its trainer, which changes all
    the time and is none of their business."""

    def __init__(self, guard: _C.ModuleGuard, names: set[str]) -> None:
        self._guard = guard
        self._names = names
        self._watched: set[int] = set()
        self._found: list[Any] = []

    def add(self, value: Any) -> None:
        self._found.append(value)

    def add_named(self, attributes: dict[str, Any]) -> None:
        self._found.extend(value for name, value in attributes.items() if name in self._names)

    def add_class(self, kind: type) -> None:
        if id(kind) not in self._watched:
            self._watched.add(id(kind))
            held = attributes(kind)
            self._guard.add_dictionary(kind, _Unchanged(attributes, held))
            self.add_named(held)

    def follow(self) -> None:
        while self._found:
            value = self._found.pop()
            if issubclass(type(value), (tuple, frozenset)):
                self._found.extend(value)
            if id(value) in self._watched or not (issubclass(type(value), _CONTAINERS) or is_of_user(value)):
                continue
            self._watched.add(id(value))
            if len(self._watched) > _MOST:
                raise CannotRecord(f"it leads to more than {_MOST} objects")
            self._watch(value)

    def _watch(self, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, (list, deque)):
            self._guard.add_items(value, tuple(map(_reference, value)))
            self._found.extend(value)
        elif issubclass(kind, set):
            self._guard.add_set(value, frozenset(value))
            self._found.extend(value)
        elif issubclass(kind, dict):
            self._guard.add_dictionary(value, _Unchanged(_of_dict, _of_dict(value)))
            self._found.extend(dict.values(value))
        if not is_of_user(value):
            return
        own = getattr(value, "__dict__", None)
        if issubclass(kind, dict) and type(own) is dict:  # which has attributes beside its items
            self._guard.add_dictionary(own, _Unchanged(_of_dict, _of_dict(own)))
            self.add_named(own)
        elif type(own) is dict or _slots_of(kind):
            held = _of_object(value)
            self._guard.add_dictionary(value, _Unchanged(_of_object, held))
            self.add_named(held)
        for each in own_classes(kind):
            self.add_class(each)


class _Unchanged:
    """Whether an owner holds what it held."""

    def __init__(self, contents: Callable[[Any], dict[Any, Any]], held: dict[Any, Any]) -> None:
        self._contents = contents
        self._before = {name: _reference(value) for name, value in held.items()}

    def __call__(self, owner: Any) -> bool:
        now, before = self._contents(owner), self._before
        return len(now) == len(before) and all(
            name in before and _is_same(value, before[name]) for name, value in now.items()
        )


def _reference(value: Any) -> Any:
    """Modules and tensors are kept by nobody but their owners: they are what takes memory."""
    return weakref.ref(value) if issubclass(type(value), (nn.Module, torch.Tensor)) else value


def _is_same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(before) is weakref.ref:
        return before() is now
    return type(now) is type(before) and _is_constant(now) and _is_constant(before) and bool(now == before)


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANTS or (type(value) is tuple and all(map(_is_constant, value)))


def _of_module(module: nn.Module) -> dict[str, Any]:
    """Batches count: torch writes a norm's running statistics without raising their versions."""
    held = module.__dict__
    found = {name: held[name] for name in held if name not in OWN_ATTRIBUTES and not name.startswith("_xopt_")}
    if "forward" in held:
        found["forward"] = held["forward"]
    count = module._buffers.get(_COUNT)
    if count is not None and not count.is_inference():
        found[_COUNT] = count._version
    return found


def _of_object(owner: Any) -> dict[str, Any]:
    stored = {name: getattr(owner, name) for name in _slots_of(type(owner)) if hasattr(owner, name)}
    return {**stored, **getattr(owner, "__dict__", {})}


def _slots_of(kind: type) -> list[str]:
    named = (each.__dict__.get("__slots__", ()) for each in own_classes(kind))
    names = [name for each in named for name in ((each,) if isinstance(each, str) else each)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _of_dict(owner: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dict.items(owner))
