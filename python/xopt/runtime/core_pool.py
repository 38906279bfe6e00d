"""Cores to run on: a `CorePool` names them, and `pin` takes the calling thread there for a while."""

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from xopt import _C, machine
from xopt.runtime.affinity import TeamBinding

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_SUSPENDING = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class CorePool:
    """Some of this machine's cores: those that are named, those of a NUMA node, or all that this process may use.

    Cores are named by Linux's CPU numbers. Without names, each physical core counts once: its hyperthreads beyond the
    first are left out. A pool is a plain value; threads are made by what runs on it.
    """

    def __init__(self, *, node: int | None = None, cores: Iterable[int] | None = None) -> None:
        if node is not None and cores is not None:
            raise ValueError(f"CorePool: expected either node or cores, got node={node} and cores={list(cores)}")
        if cores is not None:
            self._cores = _checked(cores)
        else:
            self._cores = machine.one_cpu_a_core(_cpus_of_process()) if node is None else _cores_of_node(node)

    @property
    def cores(self) -> tuple[int, ...]:
        return self._cores

    def split(self, parts: int) -> tuple["CorePool", ...]:
        """Neighbouring cores together; where they do not divide evenly, the first pools have one more."""
        if not 1 <= parts <= len(self):
            raise ValueError(f"CorePool.split: parts is {parts}, expected 1 to {len(self)}, the number of cores")
        size, more = divmod(len(self), parts)
        bounds = [part * size + min(part, more) for part in range(parts + 1)]
        return tuple(CorePool(cores=self._cores[bounds[i] : bounds[i + 1]]) for i in range(parts))

    def __len__(self) -> int:
        return len(self._cores)

    def __iter__(self) -> Iterator[int]:
        return iter(self._cores)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CorePool) and other._cores == self._cores

    def __hash__(self) -> int:
        return hash(self._cores)

    def __repr__(self) -> str:
        return f"CorePool(cores={list(self._cores)})"


def _checked(cores: Iterable[int]) -> tuple[int, ...]:
    named = tuple(cores)
    online = set(machine.online_cpus())
    if not named:
        raise ValueError("cores: expected at least one core, got none")
    for core in named:
        if not isinstance(core, int) or isinstance(core, bool):
            raise TypeError(f"cores: expected CPU numbers, got {core!r}")
        if core < 0 or (online and core not in online):
            raise ValueError(f"cores: there is no CPU {core} online; there are: {sorted(online)}")
    twice = sorted({core for core in named if named.count(core) > 1})
    if twice:
        raise ValueError(f"cores: expected each core once, got {twice} more than once")
    return named


def _cpus_of_process() -> set[int]:
    """Those of the main thread; and OpenMP's, which may have bound the main thread to one of them."""
    return os.sched_getaffinity(os.getpid()).union(_C.openmp_cpus())


def _cores_of_node(node: int) -> tuple[int, ...]:
    nodes = {known.node: machine.parse_list(known.cpus) for known in machine.numa_nodes()}
    if node not in nodes:
        raise ValueError(f"CorePool: node: there is no NUMA node {node}; there are: {sorted(nodes)}")
    allowed = _cpus_of_process()
    cores = machine.one_cpu_a_core(allowed.intersection(nodes[node]))
    if not cores:
        raise ValueError(
            f"CorePool: node: this process may run on none of node {node}'s CPUs {list(nodes[node])}, "
            f"but on {sorted(allowed)}"
        )
    return cores


class Pin(contextlib.AbstractContextManager[None]):
    """What `pin` gives: may be entered any number of times, also nested and by several threads."""

    def __init__(self, cores: tuple[int, ...]) -> None:
        self._cores = cores
        self._entered = threading.local()

    def __enter__(self) -> None:
        binding = TeamBinding(self._cores)
        self._entered.bindings = [*getattr(self._entered, "bindings", []), binding]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.bindings.pop().undo()

    def __call__(self, function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        if any(kind(function) for kind in _SUSPENDING):
            raise TypeError(f"pin: {function!r} suspends while it runs; use `with xopt.runtime.pin(...)` inside of it")

        @functools.wraps(function)
        def pinned(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            with self:
                return function(*args, **kwargs)

        return pinned


def pin(cores: Iterable[int] | CorePool) -> Pin:
    """Runs what is inside on these cores: `with pin([0, 1]):`, or `@pin([0, 1])` before a function.

    The calling thread and the threads of its OpenMP team are bound to the cores, and torch uses a thread for each;
    afterwards both are as they were. Other threads, also those started inside, keep their number of threads; what is
    started inside inherits the cores.
    """
    return Pin(CorePool(cores=cores).cores)
