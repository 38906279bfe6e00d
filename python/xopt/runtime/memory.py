"""Memory of large tensors, kept and used again instead of being given back to the system with every free.

glibc's malloc maps each large block anew. The system then clears its pages, one fault for each 4 KB, which can take a
model with large activations more time than its arithmetic. There are two ways out of it:

    preload  libxopt_pool.so (csrc/pool) stands in front of malloc: large blocks of all threads, on 2 MB pages, bounded,
             counted. It has to be loaded with the process, since torch offers no way of exchanging its CPU allocator.
    glibc    malloc itself is told to keep what is freed. That works in any process, but only for what the main thread
             allocates, without a bound, and with glibc's own counts, which are of all blocks, not of large ones.
"""

import ctypes
import functools
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from xopt import _C, machine

POOL_LIBRARY = Path(_C.__file__).with_name("libxopt_pool.so")

_HOW_TO_PRELOAD = (
    f"start the process with LD_PRELOAD={POOL_LIBRARY}, or by `xopt-launch --memory-allocator pool` (a process that "
    "runs already cannot load it any more)"
)


@dataclass(frozen=True)
class PoolStatistics:
    """None: what this backend cannot tell."""

    live_bytes: int | None
    """Of blocks in use; with glibc of all blocks, not only large ones."""
    cached_bytes: int | None
    """Held beyond that, for the next blocks; with glibc also what `trim` has given back already."""
    peak_bytes: int | None = None
    """The most that `live_bytes` was since a pool was last started or stopped."""
    hits: int | None = None
    """Blocks made of memory that was held, since a pool was last started or stopped."""
    misses: int | None = None
    """Blocks for which the system had to give memory."""
    refused: int | None = None
    """Large blocks that were left to glibc because of `max_bytes`."""


class _Backend(Protocol):
    """What the process's allocations come from; there is one of each kind."""

    name: str

    def apply(self, limits: list[int | None]) -> None:
        """Called with the bounds of all pools that are on, whenever these change; with none: all are off."""

    def trim(self, keep_bytes: int) -> int | None: ...
    def statistics(self) -> PoolStatistics: ...


# ---- libxopt_pool.so ------------------------------------------------------------------------------------------------


class _Counters(ctypes.Structure):
    """XoptPoolStatistics of csrc/pool/pool.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("live_bytes", "cached_bytes", "peak_bytes", "hits", "misses", "refused")
    )


_NO_LIMIT = 2**64 - 1


@functools.cache
def _preloaded() -> ctypes.CDLL | None:
    """The pool's functions as the process has them, where the library was there from the start."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "xopt_pool_set"):
        return None
    process.xopt_pool_set.argtypes = [ctypes.c_int, ctypes.c_uint64]
    process.xopt_pool_trim.argtypes = [ctypes.c_uint64]
    process.xopt_pool_trim.restype = ctypes.c_uint64
    return process


class _Preloaded:
    name = "preload"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        on, limit = ctypes.c_int(), ctypes.c_uint64()
        library.xopt_pool_get(ctypes.byref(on), ctypes.byref(limit))
        self._without_pools = on.value, limit.value

    def apply(self, limits: list[int | None]) -> None:
        on, limit = (
            (1, min(_NO_LIMIT if limit is None else limit for limit in limits)) if limits else self._without_pools
        )
        if self._library.xopt_pool_set(on, limit) != 0:
            raise MemoryError("memory_pool: there is no address space left for the pool (ulimit -v)")
        if limits:
            self._library.xopt_pool_reset_counters()
        if not on:
            self._library.xopt_pool_trim(0)

    def trim(self, keep_bytes: int) -> int | None:
        return int(self._library.xopt_pool_trim(keep_bytes))

    def statistics(self) -> PoolStatistics:
        counters = _Counters()
        self._library.xopt_pool_statistics(ctypes.byref(counters))
        return PoolStatistics(**{name: getattr(counters, name) for name, *_ in _Counters._fields_})


# ---- glibc ----------------------------------------------------------------------------------------------------------

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_KEEP_ALL = -1


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class _Glibc:
    """What is freed stays in malloc's heap, and nothing is mapped on its own."""

    name = "glibc"

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)

    def apply(self, limits: list[int | None]) -> None:
        if limits:
            self._set(_M_MMAP_MAX, 0)
            self._set(_M_TRIM_THRESHOLD, _KEEP_ALL)
            return
        # glibc's default count of mappings; and the thresholds at which a process with large blocks arrives by itself,
        # since glibc adapts them no more once it was told any.
        self._set(_M_MMAP_MAX, 65536)
        self._set(_M_MMAP_THRESHOLD, 32 << 20)
        self._set(_M_TRIM_THRESHOLD, 64 << 20)
        machine.give_back_freed_memory()

    def _set(self, parameter: int, value: int) -> None:
        if self._libc.mallopt(parameter, value) != 1:
            raise RuntimeError(f"memory_pool: glibc's mallopt({parameter}, {value}) failed")

    def trim(self, keep_bytes: int) -> int | None:
        machine.give_back_freed_memory(keep_bytes)
        return None

    def statistics(self) -> PoolStatistics:
        if not hasattr(self._libc, "mallinfo2"):  # glibc before 2.33
            return PoolStatistics(None, None)
        self._libc.mallinfo2.restype = _MallInfo
        info = self._libc.mallinfo2()
        return PoolStatistics(info.uordblks + info.hblkhd, info.fordblks)


# ---- The pool -------------------------------------------------------------------------------------------------------


_changing = threading.Lock()
_limits: list[int | None] = []


class MemoryPool:
    """On between `start` and `stop`, or within `with`: for the whole process. Where several are on, the tightest bound
    holds.

    Tensors made while it is on may live as long as they like. When the last pool is stopped, what was kept goes back to
    the system.
    """

    def __init__(self, backend: _Backend, max_bytes: int | None) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
        self._started = 0

    @property
    def backend(self) -> str:
        """`preload` or `glibc`."""
        return self._backend.name

    def start(self) -> None:
        with _changing:
            self._backend.apply([*_limits, self._max_bytes])
            _limits.append(self._max_bytes)
            self._started += 1

    def stop(self) -> None:
        with _changing:
            if self._started == 0:
                raise RuntimeError("memory_pool: stopped more often than it was started")
            self._started -= 1
            _limits.remove(self._max_bytes)
            self._backend.apply(_limits)

    def __enter__(self) -> "MemoryPool":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def trim(self, keep_bytes: int = 0) -> int | None:
        """Gives what is kept back to the system, but for `keep_bytes`, as far as whole pages are free.

        Returns how many bytes; None: glibc does not tell.
        """
        if keep_bytes < 0:
            raise ValueError(f"trim: keep_bytes is {keep_bytes}, expected 0 or more")
        return self._backend.trim(keep_bytes)

    def statistics(self) -> PoolStatistics:
        return self._backend.statistics()

    def __repr__(self) -> str:
        return f"MemoryPool(backend={self.backend!r}, max_bytes={self._max_bytes})"


@functools.cache
def _backend() -> _Backend:
    library = _preloaded()
    if library is not None:
        return _Preloaded(library)
    allocator = machine.allocator()
    if allocator != "glibc":
        raise RuntimeError(
            f"memory_pool: malloc is {allocator}'s in this process, and has a pool of its own; for this one, "
            f"{_HOW_TO_PRELOAD}, without {allocator}"
        )
    return _Glibc()


def memory_pool(max_bytes: int | None = None, *, preloaded: bool = False) -> MemoryPool:
    """A pool for the memory of large tensors: `with xopt.runtime.memory_pool():`, or `.start()` for good.

    `max_bytes` bounds what it holds, in use or kept; what does not fit comes from malloc as ever. That, and pooling for
    threads other than the main one, needs libxopt_pool.so to be preloaded: LD_PRELOAD, or `xopt-launch
    --memory-allocator pool`. It is then on from the start, without a bound. Where it is not there, glibc is told to
    keep what is freed; `MemoryPool.backend` says which of the two it is, and `preloaded=True` takes the first only.
    """
    if max_bytes is not None and max_bytes <= 0:
        raise ValueError(f"memory_pool: max_bytes is {max_bytes}, expected a positive number of bytes, or None")
    backend = _backend()
    if backend.name != "preload" and (preloaded or max_bytes is not None):
        wanted = "preloaded=True" if preloaded else "max_bytes (which glibc's malloc does not keep)"
        raise RuntimeError(f"memory_pool: {wanted} needs libxopt_pool.so in this process: {_HOW_TO_PRELOAD}")
    return MemoryPool(backend, max_bytes)


def keep_outputs(max_bytes: int) -> None:
    """How much memory of freed outputs xopt's operators hold for the next ones, in all threads; 0 gives all of it back
    and holds no more. Without a call it is 256 MB, or what XOPT_KEPT_OUTPUT_MB says.

    With `libxopt_pool.so` preloaded, outputs are in that pool as all else is, and nothing is held here.
    """
    if max_bytes < 0:
        raise ValueError(f"keep_outputs: max_bytes: expected a number of bytes, got {max_bytes}")
    _C.set_kept_output_bytes(max_bytes)
