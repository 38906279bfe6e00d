"""Single functions of torch done by xopt's operators, where a block's forward cannot be recorded and runs as it is.

No part of torch is patched: while such a forward runs, a `TorchFunctionMode` of this thread sees what it calls. What
takes a function's calls stands beside the operator, and is found by its mark. A forward that was seen to call none of
these functions runs without the mode, which costs a microsecond for each call that passes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.overrides import TorchFunctionMode

Substitute = TypeVar("Substitute", bound=Callable[..., Any])
_substitutes: dict[Any, Callable[..., Any]] = {}


def in_place_of(*functions: Any) -> Callable[[Substitute], Substitute]:
    """Marks what takes the calls of these functions, with their arguments. It returns NotImplemented for a call that is
    torch's."""

    def mark(substitute: Substitute) -> Substitute:
        _substitutes.update(dict.fromkeys(functions, substitute))
        return substitute

    return mark


class _State(threading.local):
    is_active = False
    met = False
    """Whether the forward that runs now, and is not one inside it, has called any of these functions."""


_state = _State()


class _Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        substitute = _substitutes.get(function)
        if substitute is not None:
            _state.met = True
            result = substitute(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)


def run_substituted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """What it returns, and whether it called something that there is a substitute for."""
    outer_met, was_active = _state.met, _state.is_active
    _state.met, _state.is_active = False, True
    try:
        if was_active:
            result = function(*args, **kwargs)
        else:
            with _Mode():
                result = function(*args, **kwargs)
        return result, _state.met
    finally:
        _state.met, _state.is_active = outer_met, was_active
