"""The machine's roofs, measured once and kept in the user's cache, one file for each CPU and number of threads."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

import xopt
from xopt.roofs import KINDS, Roof, Roofs, higher_of, measure_roofs

COPY = "copy"
_COPY_BYTES = 256 << 20
_COPY_ROUNDS = 5


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "xopt" / "roofs"


def identity(threads: int) -> dict[str, object]:
    """What a measurement holds for."""
    found = xopt.capabilities()
    return {
        "cpu": found.cpu,
        "level": found.level,
        "features": sorted(name for name, present in found.features.items() if present),
        "cpus": len(found.affinity),
        "threads": threads,
        "version": found.xopt_version,
    }


def roofs_of_machine(threads: int, *, remeasure: bool = False) -> Roofs:
    """From the cache, or measured now and put there. Where the cache cannot be written, they are measured each time."""
    key = identity(threads)
    path = cache_folder() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
    known = None if remeasure else _read(path, key)
    if known is not None:
        return known
    roofs = higher_of(measure_roofs(threads), measure_roofs(threads))
    roofs.by_kind[COPY] = Roof(_copied_per_second(threads), "copy_")
    _write(path, {"identity": key, "roofs": {kind: asdict(roof) for kind, roof in roofs.by_kind.items()}})
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


def _read(path: Path, key: dict[str, object]) -> Roofs | None:
    try:
        content = json.loads(path.read_text())
        kinds = {kind: Roof(**roof) for kind, roof in content["roofs"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if content.get("identity") != key or not {*KINDS, COPY} <= kinds.keys():
        return None
    return Roofs(int(str(key["threads"])), kinds)


def _write(path: Path, content: object) -> None:
    """In one step: another process sees the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return
