"""Roofs, kept in the user's cache: one file for each CPU and number of threads, or other device.

Whoever else is busy during a measurement lowers it, to a half where one of two cores is taken. So the first profiles on
a machine measure again, some time apart, and the highest is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import xopt
from xopt.roofs import KINDS, Roof, Roofs, higher_of, measure_roofs

COPY = "copy"
_COPY_BYTES = 256 << 20
_COPY_ROUNDS = 5
_MEASUREMENTS = 4
_SECONDS_BETWEEN = 600.0


def cache_folder() -> Path:
    return xopt.config.cache_folder() / "roofs"


def identity(threads: int) -> dict[str, object]:
    """What a measurement holds for."""
    found = xopt.capabilities()
    return {
        "cpu": found.cpu,
        "level": found.level,
        "features": list(found.present_features),
        "cpus": len(found.affinity),
        "threads": threads,
        "version": found.xopt_version,
    }


def roofs_of_machine(threads: int, *, remeasure: bool = False) -> Roofs:
    """From the cache, or measured now and put there."""
    return cached_roofs(identity(threads), lambda: _measure(threads), {*KINDS, COPY}, remeasure=remeasure)


def raised_roofs(threads: int, known: Roofs) -> Roofs:
    """Measured once more: something was faster than `known` says that the machine can be."""
    return cached_roofs(identity(threads), lambda: higher_of(known, _measure(threads)), set(), remeasure=True)


def _measure(threads: int) -> Roofs:
    roofs = higher_of(measure_roofs(threads), measure_roofs(threads))
    roofs.by_kind[COPY] = Roof(_copied_per_second(threads), "copy_")
    return roofs


def cached_roofs(
    key: dict[str, object], measure: Callable[[], Roofs], kinds: set[str], *, remeasure: bool = False
) -> Roofs:
    """What is kept under `key`, if it has all `kinds`; raised by another measurement as long as there have been few,
    and with `remeasure` replaced by one. Where the cache cannot be written, roofs are measured each time."""
    path = cache_folder() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
    known = None if remeasure else _read(path, key, kinds)
    if known is not None and not known.is_due():
        return known.roofs
    roofs = measure()
    if known is not None:
        roofs = higher_of(known.roofs, roofs)
    measurements = 1 if known is None else known.measurements + 1
    by_kind = {kind: asdict(roof) for kind, roof in roofs.by_kind.items()}
    _write(path, {"identity": key, "measurements": measurements, "time": time.time(), "roofs": by_kind})
    return roofs


def _copied_per_second(threads: int) -> float:
    """Bytes read and written a second, far beyond the caches."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source = torch.ones(_COPY_BYTES // 4)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(_COPY_ROUNDS):
            start = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * _COPY_BYTES / min(seconds)


@dataclass(frozen=True)
class _Known:
    roofs: Roofs
    measurements: int
    time: float  # of the last one

    def is_due(self) -> bool:
        return self.measurements < _MEASUREMENTS and abs(time.time() - self.time) > _SECONDS_BETWEEN


def _read(path: Path, key: dict[str, object], kinds: set[str]) -> _Known | None:
    try:
        content = json.loads(path.read_text())
        found = {kind: Roof(**roof) for kind, roof in content["roofs"].items()}
        roofs = Roofs(int(str(key.get("threads", 0))), found)
        known = _Known(roofs, int(content["measurements"]), float(content["time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return known if content.get("identity") == key and kinds <= found.keys() else None


def _write(path: Path, content: object) -> None:
    """In one step: another process sees the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return
