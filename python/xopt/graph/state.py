"""What a forward could write to beside its results, kept while it is recorded, and put back.

A program computes results alone: a forward that leaves something elsewhere (an activation in a list, a count in an
object) has to run itself. And recording calls a forward that the user did not ask for, so nothing of it may stay.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import importlib
import itertools
import pickle
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from xopt.graph.names import own_names
from xopt.graph.symbol import CannotRecord, Symbol, active, is_symbol, is_symbolic

_CACHED: type = type(functools.lru_cache(int))
_CONTAINERS = (OrderedDict, dict, list, set, deque)  # subclasses before their bases
_WORDS = (bool, int, float, str)
_LIBRARIES = sys.stdlib_module_names | {"torch", "xopt", "numpy"}
DRAWS = "random numbers are drawn"
_MOST = 50_000  # containers and objects that one recording looks through


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector, which calls whoever asked to be told of its runs in the middle of a
    forward: what those functions write is not the forward's doing."""
    paused = gc.isenabled()
    if paused:
        gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


class Surroundings(NamedTuple):
    """What a forward may have read that is no part of its modules."""

    classes: list[type]
    globals: list[tuple[dict[str, Any], str, Any]]
    """Names that the model's own functions name, and what they stand for."""
    names: set[str]
    """All names that these functions use, also in getattr."""


class State:
    """Contents of the modules below a root and of the arguments of its forward, of containers and users' objects that
    these lead to, of the modules' classes, and of globals that the model's own functions name: those of the packages
    that its modules are of, and what these call themselves. What torch calls meanwhile elsewhere may fill its tables
    (sympy does when it is first used), which is nobody's result."""

    def __init__(self, root: nn.Module, arguments: list[Any]) -> None:
        self._kept: dict[int, _Contents] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._codes: set[CodeType] = set()
        self._asked: dict[Any, list[str]] = {}
        self._generators = [(*each, pickle.dumps(each[0]())) for each in _generators(root)]
        self._packages = {_package(type(module).__module__) for module in root.modules()} - _LIBRARIES
        self._keep_all(_contents_of(arguments))
        for module in root.modules():
            self._keep_all([_Contents(module.__dict__, module)])
            for kind in own_classes(type(module)):
                if kind not in self._classes:
                    self._classes[kind] = attributes(kind)
                    self._keep_all(_contents_of(self._classes[kind].values()))

    def see_call(self, frame: FrameType) -> None:
        """A Python function begins: from now on globals that it names may change."""
        code, names, caller = frame.f_code, own_names(frame.f_globals), frame.f_back
        if code in self._codes:
            return
        package = _package(names.get("__name__", ""))
        is_own = package in self._packages or (caller is not None and caller.f_code in self._codes)
        if package in _LIBRARIES or not is_own:
            return
        self._codes.add(code)
        self._asked[code] = _asked_for_class(code)
        for name in code.co_names:
            if name in names:
                self._globals.setdefault((id(names), name), (names, name, names[name]))
                if issubclass(type(names[name]), _CONTAINERS):
                    self._keep_all(_contents_of([names[name]]))

    def see_return(self, frame: FrameType) -> None:
        """A Python function ends: `type(x)` gives a symbol away, and nothing tells when it is asked."""
        asked = self._asked.get(frame.f_code)
        if (
            asked
            and active.recorder is not None
            and is_symbolic((), {name: frame.f_locals.get(name) for name in asked})
        ):
            active.recorder.refuse(f"it asks for the class of {' or '.join(asked)}")

    def surroundings(self) -> Surroundings:
        names = {name for code in self._codes for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}
        return Surroundings(list(self._classes), list(self._globals.values()), names)

    def _keep_all(self, found: Iterable[_Contents]) -> None:
        pending = list(found)
        while pending:
            contents = pending.pop()
            if id(contents.container) in self._kept:
                continue
            if len(self._kept) >= _MOST:
                raise CannotRecord(f"a {type(contents.owner).__name__} leads to more than {_MOST} objects")
            self._kept[id(contents.container)] = contents
            pending.extend(_contents_of(contents.values()))

    def restore(self) -> str | None:
        """Puts everything back; what was changed, in words."""
        changed = None
        for contents in self._kept.values():
            if contents.restore():
                changed = f"a {type(contents.owner).__name__} is changed"
        for kind, before in self._classes.items():
            now = attributes(kind)
            if not _same_items(now, before):
                changed = f"attributes of the class {kind.__name__} are changed"
                for name in now.keys() - before.keys():
                    delattr(kind, name)
                for name, value in before.items():
                    setattr(kind, name, value)
        for names, name, value in self._globals.values():
            if not _same(names.get(name), value):
                changed = f"the global {name} is changed"
                names[name] = value
        for get, put, state in self._generators:
            if pickle.dumps(get()) != state:
                changed = DRAWS
                put(pickle.loads(state))
        return changed


class _Contents:
    """What is in a container, or in an owner's __dict__."""

    def __init__(self, container: Any, owner: Any = None) -> None:
        self.container = container
        self.owner = container if owner is None else owner
        self._base = next(base for base in _CONTAINERS if isinstance(container, base))
        self._content = self._now()

    def _now(self) -> Any:
        """By the class's own methods: a subclass may have others."""
        base: Any = self._base
        if issubclass(base, dict):
            return dict(base.items(self.container))
        return set(self.container) if base is set else list(base.__iter__(self.container))

    def values(self) -> Iterable[Any]:
        return self._content.values() if isinstance(self._content, dict) else self._content

    def restore(self) -> bool:
        """Whether there was anything to undo."""
        if _same_items(self._now(), self._content):
            return False
        base: Any = self._base
        base.clear(self.container)
        if issubclass(base, dict):
            for name, value in self._content.items():
                base.__setitem__(self.container, name, value)
        else:
            (base.update if base is set else base.extend)(self.container, self._content)
        return True


def _contents_of(values: Iterable[Any]) -> Iterable[_Contents]:
    """Of those values that can be written to."""
    for value in values:  # symbols claim to be of other classes than they are
        if issubclass(type(value), _CONTAINERS):
            yield _Contents(value)
        elif issubclass(type(value), (tuple, frozenset)):
            yield from _contents_of(value)
        elif is_of_user(value) and type(getattr(value, "__dict__", None)) is dict:
            yield _Contents(value.__dict__, value)


def _generators(root: nn.Module) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Of random numbers, Python's, numpy's and those of modules: what gives the state of each, and what sets it. Not
    torch's own: steps that draw from it do so in each call."""
    yield random.getstate, random.setstate
    # numpy itself loads this part when it is first asked for, which may be in the forward.
    numbers = importlib.import_module("numpy.random") if "numpy" in sys.modules else None
    if numbers is not None:
        yield numbers.get_state, numbers.set_state
    for module in root.modules():
        for value in module.__dict__.values():
            kind = type(value)
            if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
                yield value.getstate, value.setstate
            elif numbers is not None and issubclass(kind, numbers.RandomState):
                yield value.get_state, value.set_state
            elif numbers is not None and issubclass(kind, numbers.Generator):
                source = value.bit_generator
                yield functools.partial(getattr, source, "state"), functools.partial(setattr, source, "state")
            elif issubclass(kind, torch.Generator):
                yield value.get_state, value.set_state


def is_of_user(value: Any) -> bool:
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    return not (_is_library(kind.__module__) or issubclass(kind, (nn.Module, ModuleType, type)))


_COMPARING = ("IS_OP", "COMPARE_OP", "CONTAINS_OP", "BINARY_SUBSCR", "STORE_FAST")


def _asked_for_class(code: CodeType) -> list[str]:
    """Of which variables, or of what in them, a function looks what class they are of: compares it, looks it up, or
    keeps it. Their names in messages and the like, which libraries make of it, are nothing that a forward goes by."""
    if "type" not in code.co_names and "__class__" not in code.co_names:
        return []
    asked: dict[str, None] = {}
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _NOTHING]
    for place, (one, other) in enumerate(itertools.pairwise(instructions)):
        if one.argval == "type" and one.opname.startswith("LOAD"):
            variable = other
            called = next((each for each in range(place, len(instructions)) if _is_call(instructions[each])), place)
            rest = instructions[called + 1 :]
        elif other.argval == "__class__" and other.opname.startswith("LOAD_ATTR"):
            variable, rest = one, instructions[place + 2 :]
        else:
            continue
        used = next((each.opname for each in rest if not each.opname.startswith("LOAD")), "")
        compares = used in _COMPARING or instructions[place - 1].argval == "issubclass"
        if compares and variable.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            asked[variable.argval if isinstance(variable.argval, str) else variable.argval[0]] = None
    return list(asked)


_NOTHING = ("PUSH_NULL", "CACHE", "PRECALL")


def _is_call(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("CALL")


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_library(module: str) -> bool:
    return _package(module) in _LIBRARIES


def own_classes(kind: type) -> list[type]:
    """Those of a class's bases, and itself, that are no library's."""
    return [each for each in kind.__mro__ if not _is_library(each.__module__)]


def attributes(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and type(now) in _WORDS and bool(now == before))


def _same_items(now: Any, before: Any) -> bool:
    """Whether a container holds the very same objects."""
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_same(now[name], value) for name, value in before.items())
    return len(now) == len(before) and all(map(_same, now, before))


def left_behind(symbols: list[weakref.ref[Symbol]]) -> bool:
    """Whether somebody still holds one after the recording."""
    for tidy in (None, gc.collect, _clear_caches):
        if tidy is not None:
            tidy()
        if all(symbol() is None for symbol in symbols):
            return False
    return True


def _clear_caches() -> None:
    """Those of functools.lru_cache that hold symbols, which no later call finds there."""
    for each in gc.get_objects():
        if type(each) is _CACHED and _leads_to_symbol(each, 4):
            cached: Any = each
            cached.cache_clear()


def _leads_to_symbol(value: Any, steps: int) -> bool:
    """A cache refers to a dictionary, that to keys and links, and these to arguments and results."""
    if is_symbol(value) or steps == 0:
        return is_symbol(value)
    return any(_leads_to_symbol(each, steps - 1) for each in gc.get_referents(value))
