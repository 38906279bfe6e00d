"""A callable that runs on cores of its own, in a thread of its own."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from xopt.runtime.affinity import TeamBinding
from xopt.runtime.core_pool import CorePool

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class _CallerState:
    """What torch keeps for each thread and a computation depends on: grad mode, inference mode and autocast."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")
        self._autocast_dtype = torch.get_autocast_dtype("cpu")
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._autocast:
                autocast = torch.autocast("cpu", dtype=self._autocast_dtype, cache_enabled=self._autocast_cache)
                stack.enter_context(autocast)
            yield


class _Worker:
    """One thread, which binds itself to the cores before its first call and sees to it before each later one."""

    def __init__(self, cores: tuple[int, ...]) -> None:
        self.process = os.getpid()
        self._cores = cores
        self._binding: TeamBinding | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"xopt-task-{cores[0]}")

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        state = _CallerState()

        def call() -> Any:
            if self._binding is None:
                self._binding = TeamBinding(self._cores)
            else:
                self._binding.renew()
            with state.applied():
                return function(*args, **kwargs)

        return self._executor.submit(call)

    def close(self) -> None:
        self._executor.shutdown()


class Task(Generic[_Parameters, _Result]):
    """`function` run asynchronously on the cores of `pool`: a call returns a future at once.

    Calls run one after another, in their order, in one thread that is bound to the cores with its OpenMP team and that
    has the caller's grad mode, inference mode and autocast. The thread ends when the task is no longer used. Tasks on
    the same cores compete for them.
    """

    def __init__(self, function: Callable[_Parameters, _Result], pool: CorePool) -> None:
        if not callable(function):
            raise TypeError(f"Task: function: expected something to call, got {function!r}")
        if not isinstance(pool, CorePool):
            raise TypeError(f"Task: pool: expected a CorePool, got {pool!r}")
        self._function = function
        self._pool = pool
        self._worker = _Worker(pool.cores)

    @property
    def pool(self) -> CorePool:
        return self._pool

    def __call__(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> "Future[_Result]":
        if self._worker.process != os.getpid():  # a forked child has none of its parent's threads
            self._worker = _Worker(self._pool.cores)
        return self._worker.submit(self._function, *args, **kwargs)

    def close(self) -> None:
        """Waits for the calls that are under way, and ends the thread. A later call raises RuntimeError."""
        self._worker.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Task, (self._function, self._pool)

    def __repr__(self) -> str:
        return f"Task({self._function!r}, {self._pool!r})"
