"""torch's autocast, whose state each type of device has for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on this device; None: it is off. Devices that we have no kernels for, which need not
    know autocast, go by the CPU's."""
    kind = "xpu" if device.type == "xpu" else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def is_inside() -> bool:
    """Whether somebody has said something of autocast, though it be that it is off."""
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


CASTS = ("float", "to", "type")  # a tensor's methods that change its dtype to fp32, or may


def widens(source: torch.dtype, result: torch.dtype) -> bool:
    """Whether a change of dtype makes fp32 of what autocast computes in."""
    return source in (torch.bfloat16, torch.float16) and result == torch.float32


@contextlib.contextmanager
def without_autocast(on: bool = True) -> Iterator[None]:
    before = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", before and not on)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before)


class _Own(threading.local):
    depth = 0


_own = _Own()


def is_own() -> bool:
    """Whether autocast is on for a model that was optimized to another dtype, and not by its user."""
    return _own.depth > 0


class _Entered:
    """torch.autocast with none of the checks that its arguments get: with cold caches these take as long as a small
    layer."""

    __slots__ = ("_before", "_dtype", "_kind")

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        self._kind = kind
        self._dtype = dtype

    def __enter__(self) -> None:
        kind = self._kind
        self._before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, self._dtype)
        torch.autocast_increment_nesting()
        _own.depth += 1

    def __exit__(self, *problem: object) -> None:
        _own.depth -= 1
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        enabled, dtype = self._before
        torch.set_autocast_enabled(self._kind, enabled)
        torch.set_autocast_dtype(self._kind, dtype)


def autocast(kind: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """`torch.autocast`, which compilers know as torch's own."""
    if torch.compiler.is_compiling() or torch._C._is_torch_function_mode_enabled():
        return torch.autocast(kind, dtype=dtype)
    return _Entered(kind, dtype)
