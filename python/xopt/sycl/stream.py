"""Sending a thread's operators to a SYCL device."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

from xopt import config
from xopt.sycl import loading
from xopt.sycl.devices import find

_streams = threading.local()


@dataclass(frozen=True)
class Builds:
    """What a device's kernels have cost to get, since the thread first used it."""

    compiled: int
    read: int
    """Out of the cache on disk."""
    rejected: int
    """Files of the cache that were damaged or of something else, and were made anew."""
    compile_seconds: float
    read_seconds: float


@dataclass(frozen=True)
class Tile:
    matrix: bool
    """Whether matrix units multiply it; else vectors run the same loops."""
    rows: int
    columns: int
    depth: int


class device:  # noqa: N801 - as torch.device, which can be a context as well
    """Within it, the calling thread's xopt operators run on a SYCL device, on the tensors that they are given.

    name: "cpu", "gpu", or a number of `devices()`. Operators on tensors of the CPU need a device with system USM.
    tile: rows, columns and depth (of bf16) of the tiles that products are cut into, in place of the best that the
        device has; (8, 16, 16) is that of XMX.
    asynchronous: operators return before their results are there. What they use stays alive until then, whoever drops
        it; the caller does not read or change it before `synchronize()`. An operator that has no kernel on the device,
        or has to copy a tensor into another layout first, waits. Otherwise each waits, since what reads a tensor of the
        CPU next may be torch.
    """

    def __init__(
        self, name: str = "cpu", *, tile: tuple[int, int, int] | None = None, asynchronous: bool = False
    ) -> None:
        found = find(name)
        if not found.usm_system:
            raise RuntimeError(
                f"xopt.sycl: device {found.name} cannot work on tensors of the CPU: it lacks system USM; take"
                " another, or move the model to it with to('xpu')"
            )
        key = (found.number, tile, asynchronous)
        known = _streams.__dict__.setdefault("by_key", {})
        if key not in known:
            folder = str(config.cache_folder() / "sycl")
            known[key] = loading.native().open(found.number, folder, tile, not asynchronous)
        self._stream = known[key]

    def __enter__(self) -> device:
        stack = _streams.__dict__.setdefault("stack", [])
        stack.append(self._stream)
        loading.native().use(self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _streams.stack.pop()
        loading.native().use(_streams.stack[-1] if _streams.stack else None)

    def synchronize(self) -> None:
        """Waits for all that was called on it."""
        self._stream.synchronize()

    def synchronizations(self) -> int:
        """How often the host has waited for the device."""
        return int(self._stream.synchronizations())

    def builds(self) -> Builds:
        return Builds(**self._stream.builds())

    def tile(self, dtype: str) -> Tile:
        """How products of a dtype ("bf16", "f16", "f32", "s8", "u8") are computed."""
        return Tile(*self._stream.tile(dtype))


def calls_left_to_cpu() -> dict[str, int]:
    """How often operators within a `device` found no kernel of theirs on it, by "name dtype"; the CPU's ran instead."""
    counts: dict[str, int] = loading.native().calls_left_to_cpu()
    return counts


def calls() -> dict[str, int]:
    """How often each kernel was run on SYCL devices in this process, by "name dtype"; others only the CPU has."""
    counts: dict[str, int] = loading.native().calls()
    return counts
