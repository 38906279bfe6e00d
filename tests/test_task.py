"""Tasks: on their cores, in their order, in their caller's modes, and with their errors."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.thread_masks import CPUS, needs_two_cpus, team_cpus
from xopt.runtime import CorePool, Task, pin
from xopt.runtime.affinity import set_own_threads


@needs_two_cpus
def test_a_task_runs_on_its_cores() -> None:
    task = Task(lambda value: (value, torch.get_num_threads(), team_cpus()), CorePool(cores=[CPUS[1]]))
    assert task(3).result() == (3, 1, [[CPUS[1]]])
    both = Task(team_cpus, CorePool(cores=CPUS[:2]))
    assert both().result() == [CPUS[:2]] * 2


@needs_two_cpus
def test_a_task_puts_right_what_a_call_changed() -> None:
    def spoil() -> None:
        set_own_threads(1)
        os.sched_setaffinity(0, CPUS[:1])

    calls: dict[str, Callable[[], Any]] = {"spoil": spoil, "look": team_cpus}
    task = Task(lambda name: calls[name](), CorePool(cores=CPUS[:2]))
    task("spoil").result()
    assert task("look").result() == [CPUS[:2]] * 2


def test_calls_of_a_task_keep_their_order() -> None:
    seen: list[int] = []
    task = Task(seen.append, CorePool(cores=CPUS[:1]))
    for future in [task(number) for number in range(50)]:
        future.result()
    assert seen == list(range(50))


def test_an_exception_reaches_whoever_asks() -> None:
    def fail(name: str) -> None:
        raise KeyError(name)

    task = Task(fail, CorePool(cores=CPUS[:1]))
    with pytest.raises(KeyError, match="of my own"):
        task("of my own").result()
    assert isinstance(task("again").exception(), KeyError)


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference", "autocast"])
def test_a_task_has_the_modes_of_its_caller(mode: str) -> None:
    def state() -> tuple[object, ...]:
        autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if autocast else None
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, dtype

    modes: dict[str, contextlib.AbstractContextManager[Any]] = {
        "grad": torch.enable_grad(),
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.float16),
    }
    task = Task(state, CorePool(cores=CPUS[:1]))
    with modes[mode]:
        assert task().result() == state()
    assert task().result() == state()


def test_what_is_no_task() -> None:
    with pytest.raises(TypeError, match="function: expected something to call, got 3"):
        Task(3, CorePool())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pool: expected a CorePool"):
        Task(print, [0])  # type: ignore[arg-type]


def test_a_closed_task_says_so() -> None:
    task = Task(int, CorePool(cores=CPUS[:1]))
    running = task("7")
    task.close()
    assert running.result() == 7
    with pytest.raises(RuntimeError, match="after shutdown"):
        task("8")


def test_a_task_can_be_pickled() -> None:
    task = pickle.loads(pickle.dumps(Task(abs, CorePool(cores=CPUS[:1]))))
    assert task(-5).result() == 5


def test_the_thread_of_a_task_ends_with_it() -> None:
    before = set(threading.enumerate())
    task = Task(int, CorePool(cores=CPUS[:1]))
    task("1").result()
    (worker,) = set(threading.enumerate()) - before
    del task
    gc.collect()
    worker.join()


def test_a_task_and_a_pin_after_a_fork() -> None:
    """The child makes a thread of its own, since it has none of its parent's."""
    task = Task(lambda: sorted(os.sched_getaffinity(0)), CorePool(cores=CPUS[:1]))
    assert task().result() == CPUS[:1]
    child = os.fork()
    if child == 0:
        try:
            with pin(CPUS[:1]):
                same = sorted(os.sched_getaffinity(0)) == CPUS[:1]
            os._exit(0 if same and task().result() == CPUS[:1] else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert task().result() == CPUS[:1]
