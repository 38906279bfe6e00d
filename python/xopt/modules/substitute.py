"""Single functions of torch done by xopt's operators, where a block's forward cannot be recorded and runs as it is.

No part of torch is patched: while such a forward runs, a `TorchFunctionMode` of this thread sees what it calls. What
takes a function's calls stands beside the operator, and is found by its mark. A forward that was seen to call none of
these functions runs without the mode, which costs some microseconds for each call that passes it; and so does one whose
calls are so many for each that is substituted (a scan over time, step by step) that the mode costs more than it saves.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from xopt.config import Config
from xopt.graph.autocast import CASTS, widens
from xopt.graph.record import active
from xopt.graph.signature import TENSORS
from xopt.ops.fakes import FLOATING

Function = TypeVar("Function", bound=Callable[..., Any])


class _Substitute(NamedTuple):
    switch: str | None
    function: Callable[..., Any]


_substitutes: dict[Any, _Substitute] = {}


def in_place_of(*functions: Any, switch: str | None) -> Callable[[Function], Function]:
    """Marks what takes the calls of these functions, with their arguments. It returns NotImplemented for a call that is
    torch's. `switch`: the name in `Config` that turns it off; None for what mends calls that torch would refuse, which
    a forward that has none of goes without."""

    def mark(substitute: Function) -> Function:
        _substitutes.update(dict.fromkeys(functions, _Substitute(switch, substitute)))
        return substitute

    return mark


def are_plain(*tensors: Any) -> bool:
    """Whether xopt's operators may be given them: not what torch or others derive from tensors (distributed, fake), and
    no nested ones. None is no tensor, and may stand for one."""
    return all(each is None or (type(each) in TENSORS and not each.is_nested) for each in tensors)


def are_floats_on_cpu(*tensors: torch.Tensor | None) -> bool:
    """Whether operators that are the CPU's alone may be given them."""
    return are_plain(*tensors) and all(each is None or (each.is_cpu and each.dtype in FLOATING) for each in tensors)


_CASTS = frozenset(getattr(torch.Tensor, name) for name in CASTS)


_MOST_PASSED = 512
"""For each call that is substituted."""


class Watch(enum.Enum):
    """What the mode was to a forward."""

    needed = "it calls functions that have a substitute"
    idle = "it calls none"
    costly = "so many calls pass for each that is substituted that it runs faster without"


class _Calls:
    """What a forward calls, and not one inside it."""

    __slots__ = ("mended", "met", "passed", "used")

    def __init__(self) -> None:
        self.met = self.mended = False
        """Whether it has called a function that has a substitute, or one that torch would have refused."""
        self.passed = self.used = 0
        """Calls in all, and those that were substituted."""

    def judged(self) -> Watch:
        if not self.mended and self.passed > _MOST_PASSED * max(1, self.used):
            return Watch.costly
        return Watch.needed if self.met or self.mended else Watch.idle


class _State(threading.local):
    mode: _Mode | None = None
    """The one that is active."""

    def __init__(self) -> None:
        self.calls = _Calls()
        """Of the forward that runs now."""
        self.widened: dict[int, weakref.ref[torch.Tensor]] = {}
        """By id: what the forward that runs now has itself made fp32 of bf16 or fp16."""


_state = _State()


def was_widened(tensor: torch.Tensor) -> bool:
    """Whether the forward that runs now asked for this tensor in fp32."""
    found = _state.widened.get(id(tensor))
    return found is not None and found() is tensor


class _Mode(TorchFunctionMode):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if active.recorder is not None:  # a block inside is recorded: patterns look for torch's functions
            return function(*args, **kwargs)
        calls = _state.calls
        calls.passed += 1
        found = _substitutes.get(function)
        if found is not None and (found.switch is None or getattr(self._config, found.switch)):
            result = found.function(*args, **kwargs)
            calls.met |= found.switch is not None
            if result is not NotImplemented:
                calls.used += 1
                calls.mended |= found.switch is None
                return result
        result = function(*args, **kwargs)
        if function in _CASTS and type(result) is torch.Tensor and widens(args[0].dtype, result.dtype):
            _state.widened[id(result)] = weakref.ref(result)
        return result


def run_substituted(config: Config, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Watch]:
    """What it returns, and what the mode was to it."""
    outer, _state.calls = _state.calls, _Calls()
    try:
        if _state.mode is not None:
            result = forward(*args, **kwargs)
        else:
            try:
                with _Mode(config) as _state.mode:
                    result = forward(*args, **kwargs)
            finally:
                _state.mode = None
                _state.widened.clear()
        return result, _state.calls.judged()
    finally:
        _state.calls = outer


def run_plainly(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What it returns, without the mode of a forward that this one is inside of."""
    mode = _state.mode
    if mode is None or _get_current_function_mode() is not mode:  # type: ignore[no-untyped-call]
        return forward(*args, **kwargs)
    widened, _state.widened = _state.widened, {}
    _state.mode = None
    try:
        with _pop_mode_temporarily():
            return forward(*args, **kwargs)
    finally:
        _state.mode, _state.widened = mode, widened
