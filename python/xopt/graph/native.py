"""What runs natively while a forward is recorded: Python tells of it where it tells profilers."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from torch._functorch import utils

Method = TypeVar("Method", bound=Callable[..., Any])
_ASKS_FOR_MEMORY = getattr(getattr(utils, "unwrap_dead_wrappers", None), "__code__", None)
"""Torch's own isinstance in Python, before it hands what is a tensor to native code (autograd.Function.apply)."""


class _Native(threading.local):
    """Which native functions run in this thread, while `watch` is on."""

    isinstances = 0
    """How many of them are Python's isinstance."""
    asks_for_memory = 0
    """How many times torch is about to ask so for what it wants the memory of."""

    def __init__(self) -> None:
        self._callers: set[FrameType] = set()

    @contextlib.contextmanager
    def watch(self, see_call: Callable[[FrameType], None], see_return: Callable[[FrameType], None]) -> Iterator[None]:
        """These are told of each Python function that begins and ends meanwhile."""

        def see(frame: FrameType, event: str, function: Any) -> None:
            if event == "call":
                self.asks_for_memory += frame.f_code is _ASKS_FOR_MEMORY
                see_call(frame)
            elif event == "return":
                self.asks_for_memory -= frame.f_code is _ASKS_FOR_MEMORY
                see_return(frame)
            elif event == "c_call":
                self._callers.add(frame)
                self.isinstances += function is isinstance
            else:
                self._callers.discard(frame)
                self.isinstances -= function is isinstance

        previous = sys.getprofile()
        sys.setprofile(see)
        try:
            yield
        finally:
            sys.setprofile(previous)
            self.isinstances = self.asks_for_memory = 0
            self._callers.clear()

    @property
    def is_asked(self) -> bool:
        """Whether somebody asks in Python what something is an instance of, for whom a symbol is what it stands for."""
        return self.isinstances > 0 and not self.asks_for_memory

    def is_cache(self, caller: FrameType) -> bool:
        """Whether what a Python function calls is neither a function nor a method, whose calls are seen, nor a class of
        Python's that may hash: so much is known of functools.lru_cache."""
        code = caller.f_code
        calls = dis.opname[code.co_code[caller.f_lasti]].startswith(("CALL", "PRECALL", "INSTRUMENTED_CALL"))
        return calls and caller not in self._callers and not _HASHING & set(code.co_names)


def unwatched(method: Method) -> Method:
    """Marks what a recording does itself, of which nobody has to be told: to be told takes as long as many calls."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        see = sys.getprofile()
        if see is None:
            return method(*args, **kwargs)
        sys.setprofile(None)
        try:
            return method(*args, **kwargs)
        finally:
            sys.setprofile(see)

    return run  # type: ignore[return-value]


_HASHING = frozenset({"set", "frozenset", "dict", "map", "filter"})
native = _Native()
