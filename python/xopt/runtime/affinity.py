"""A thread and its OpenMP team on given cores, and back.

Each Python thread that runs torch's parallel operators has a team of its own, with libgomp as with libiomp5. How many
threads it has is a setting of that Python thread, which torch.set_num_threads makes; torch also takes the number as
the default of threads that have none yet, which is put back here: what a worker uses is no business of the others.

All threads of a team may run on all of its cores. Binding each to a core of its own would leave the calling thread on
one core, and everything that it starts later (a team that libgomp has to rebuild, loader processes) would crowd there.
"""

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from xopt import _C, machine

_Result = TypeVar("_Result")

_default_in_use = threading.Lock()


def _in_new_thread(call: Callable[[], _Result]) -> _Result:
    results: list[_Result] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="xopt-threads")
    thread.start()
    thread.join()
    return results[0]


def set_own_threads(count: int) -> None:
    """torch.set_num_threads for the calling thread alone: threads that come later keep the default that there was.

    torch has no such setting, so for a moment `count` is the default: a thread whose first parallel operator falls into
    it would keep `count`.
    """
    with _default_in_use:
        default = _in_new_thread(torch.get_num_threads)
        torch.get_num_threads()  # torch gives a thread the default when it first asks, were it after its own setting
        torch.set_num_threads(count)
        _in_new_thread(lambda: torch.set_num_threads(default))


class TeamBinding:
    """The calling thread and its team on `cores`, with a thread for each, until `undo` in the same thread."""

    def __init__(self, cores: tuple[int, ...]) -> None:
        _require_openmp()
        self._cores = cores
        self._threads_before = torch.get_num_threads()
        self._mask_before = sorted(os.sched_getaffinity(0))
        self._team_before: dict[int, list[int]] = {}
        set_own_threads(len(cores))
        try:
            self._team_before = dict(self._bind())
            self._verify()
        except BaseException:
            self.undo()
            raise

    def renew(self) -> None:
        """Once more, where the thread may have been changed: cheap, a parallel region without a payload."""
        if torch.get_num_threads() != len(self._cores):
            set_own_threads(len(self._cores))
        self._bind()

    def undo(self) -> None:
        _C.bind_team(self._mask_before, self._team_before)
        set_own_threads(self._threads_before)

    def _bind(self) -> list[tuple[int, list[int]]]:
        try:
            return _C.bind_team(list(self._cores), {})
        except OSError as error:
            allowed = sorted(os.sched_getaffinity(os.getpid()))
            raise ValueError(
                f"cores: Linux does not let this process run on {list(self._cores)}, but on {allowed}: {error}"
            ) from error

    def _verify(self) -> None:
        if _C.openmp_threads() != len(self._cores):
            raise RuntimeError(
                f"cores: torch and xopt use different OpenMP runtimes in this process (xopt: {_C.openmp_library()}; "
                f"loaded: {', '.join(machine.openmp_runtimes())}), so torch's threads cannot be bound"
            )
        for thread, cpus in _C.team_masks():
            if sorted(cpus) != sorted(self._cores):
                raise ValueError(
                    f"cores: asked for {list(self._cores)}, but Linux lets thread {thread} run on {cpus} only: "
                    "the others are offline, outside this control group's cpuset, or taken away by an OpenMP setting "
                    "(OMP_PROC_BIND, GOMP_CPU_AFFINITY, KMP_AFFINITY)"
                )


def _require_openmp() -> None:
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        raise RuntimeError(
            "cores: this build of torch does not run on OpenMP but on a pool of threads of its own, which cannot be "
            "bound to cores; start the process on them instead (taskset, xopt-launch)"
        )
