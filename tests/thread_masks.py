"""On which CPUs the threads of this process may run, as the kernel tells; for tests of pinning."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from xopt import _C, machine

# OpenMP may have bound this thread to one of the process's CPUs.
CPUS = sorted({*os.sched_getaffinity(0), *_C.openmp_cpus()})

needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="NOT RUN: pinning needs two CPUs to choose from")


def allowed(thread_id: int) -> list[int]:
    """The CPUs that a thread of this process may run on, as the kernel tells."""
    for line in pathlib.Path(f"/proc/self/task/{thread_id}/status").read_text().splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return list(machine.parse_list(line.partition(":")[2]))
    raise AssertionError("no Cpus_allowed_list in /proc")


def team() -> list[int]:
    return [thread for thread, _ in _C.team_masks()]


def team_cpus() -> list[list[int]]:
    """Of each thread of the calling thread's OpenMP team."""
    return [allowed(thread) for thread in team()]


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()
