"""Hooks of a library's own that do nothing until somebody wakes them: transformers leaves one on each layer once it was
asked for hidden states, and they look at a variable to see whether they are wanted.

A recording runs them like the forward that they are part of. A program stands for a forward whose hooks sleep when it
begins; whether it wakes them itself is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType

from torch import nn

from xopt import _C

_awake: list[Callable[[], bool]] = []


def hooked(module: nn.Module) -> bool:
    """Whether somebody wants to see, or change, what goes into this very module and what comes out of it."""
    return _C.ModuleGuard.is_hooked(module)


def let_sleep(code: CodeType, is_awake: Callable[[], bool]) -> None:
    """Hooks with this code do nothing but where `is_awake()`."""
    _C.ModuleGuard.let_sleep(code)
    _awake.append(is_awake)


def have_sleeping_hooks(modules: list[nn.Module]) -> bool:
    return any(map(_C.ModuleGuard.has_sleeping_hooks, modules))


def are_awake() -> bool:
    return any(is_awake() for is_awake in _awake)
