"""Pools of cores, and pinning: masks are read back from /proc, for the threads that torch and xopt really use."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests import fresh_process
from tests.thread_masks import CPUS, allowed, in_thread, needs_two_cpus, team, team_cpus
from xopt import _C, machine
from xopt.runtime import CorePool, pin
from xopt.runtime.affinity import set_own_threads


@pytest.fixture(autouse=True)
def nothing_is_left_changed() -> Iterator[None]:
    masks = team_cpus()
    threads, default, mask = torch.get_num_threads(), in_thread(torch.get_num_threads), os.sched_getaffinity(0)
    yield
    assert torch.get_num_threads() == threads
    assert in_thread(torch.get_num_threads) == default
    assert os.sched_getaffinity(0) == mask
    assert team_cpus() == masks


# ---- Pools ----------------------------------------------------------------------------------------------------------


def test_a_pool_of_named_cores() -> None:
    pool = CorePool(cores=reversed(CPUS))
    assert pool.cores == tuple(reversed(CPUS))
    assert list(pool) == list(reversed(CPUS))
    assert pool == CorePool(cores=reversed(CPUS))
    assert len({pool, CorePool(cores=reversed(CPUS))}) == 1


def test_a_pool_without_names_has_each_physical_core_once() -> None:
    assert CorePool().cores == machine.one_cpu_a_core(CPUS)


def test_a_pool_of_a_process_whose_threads_openmp_binds() -> None:
    """Its main thread is bound to one CPU: that is not all that the process may use."""
    program = "import xopt; print(list(xopt.runtime.CorePool()))"
    listed = ",".join(map(str, CPUS))
    gnu, intel = {"GOMP_CPU_AFFINITY": listed}, {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]"}
    bound = gnu if "libgomp" in _C.openmp_library() else intel
    assert fresh_process.output_of(program, **bound) == str(list(machine.one_cpu_a_core(CPUS)))


def test_a_pool_of_a_node() -> None:
    node = next(node for node in machine.numa_nodes() if set(machine.parse_list(node.cpus)) & set(CPUS))
    pool = CorePool(node=node.node)
    assert set(pool.cores) <= set(machine.parse_list(node.cpus)) & set(CPUS)
    with pytest.raises(ValueError, match=r"no NUMA node 4711; there are: \["):
        CorePool(node=4711)


@pytest.mark.parametrize(("cores", "parts", "expected"), [(1, 1, [1]), (5, 2, [3, 2]), (7, 3, [3, 2, 2])])
def test_a_pool_is_split_into_neighbours(
    cores: int, parts: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "online_cpus", lambda: tuple(range(8)))
    split = CorePool(cores=range(cores)).split(parts)
    assert [len(part) for part in split] == expected
    assert [core for part in split for core in part] == list(range(cores))


@pytest.mark.parametrize("parts", [0, -1, 3])
def test_a_pool_cannot_be_split_into_more_than_it_has(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "online_cpus", lambda: (0, 1))
    with pytest.raises(ValueError, match=rf"parts is {parts}, expected 1 to 2"):
        CorePool(cores=[0, 1]).split(parts)


@pytest.mark.parametrize(
    ("cores", "error"),
    [
        ([], "at least one core"),
        ([CPUS[0], CPUS[0]], "more than once"),
        ([-1], "no CPU -1 online"),
        ([100_000], "no CPU 100000 online"),
        (["0"], "expected CPU numbers, got '0'"),
        ([True], "expected CPU numbers, got True"),
    ],
)
def test_cores_that_cannot_be(cores: list[Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        CorePool(cores=cores)
    with pytest.raises((ValueError, TypeError), match=error):
        pin(cores)


def test_node_and_cores_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="either node or cores"):
        CorePool(node=0, cores=[0])


def test_hyperthreads_are_left_out(tmp_path: pathlib.Path) -> None:
    """Four cores of two threads each, numbered as Linux mostly does, of which some are not to be used."""
    for cpu in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert machine.one_cpu_a_core(range(8), tmp_path) == (0, 1, 2, 3)
    assert machine.one_cpu_a_core([7, 6, 3, 1], tmp_path) == (1, 3, 6)


# ---- Pinning --------------------------------------------------------------------------------------------------------


@needs_two_cpus
def test_pin_binds_and_restores() -> None:
    before = allowed(threading.get_native_id())
    with pin([CPUS[1]]):
        assert torch.get_num_threads() == _C.max_threads() == _C.openmp_threads() == 1
        assert allowed(threading.get_native_id()) == [CPUS[1]]
        assert team_cpus() == [[CPUS[1]]]
    assert allowed(threading.get_native_id()) == before


@needs_two_cpus
def test_pins_nest() -> None:
    outer = pin([CPUS[0]])
    with outer:
        with pin(CPUS[:2]):
            assert team_cpus() == [CPUS[:2]] * 2
            with outer:
                assert team_cpus() == [[CPUS[0]]]
            assert team_cpus() == [CPUS[:2]] * 2
        assert team_cpus() == [[CPUS[0]]]


@needs_two_cpus
def test_a_team_that_grows_stays_on_the_cores() -> None:
    """Threads that libgomp has to start inherit the cores; libiomp5 hands out the process's."""
    if "libgomp" not in _C.openmp_library() or _C.openmp_cpus():
        pytest.skip(f"{_C.openmp_library()} binds the threads that it starts")

    def work() -> None:
        with pin([CPUS[1]]):
            for threads in (3, 2, 4):
                set_own_threads(threads)
                assert team_cpus() == [[CPUS[1]]] * threads

    in_thread(work)


@needs_two_cpus
@pytest.mark.parametrize("core", CPUS[:2])
def test_the_first_region_of_a_thread_does_not_undo_a_pin(core: int) -> None:
    """libiomp5 sets the mask of a thread back in it."""

    def work() -> list[list[int]]:
        with pin([core]):
            torch.randn(100, 1000).exp()
            return team_cpus()

    assert in_thread(work) == [[core]]


@needs_two_cpus
def test_pin_as_a_decorator() -> None:
    @pin(CorePool(cores=[CPUS[1]]))
    def work(value: int, *, more: int = 0) -> tuple[int, list[list[int]]]:
        """What it does."""
        return value + more, team_cpus()

    assert work(1, more=2) == (3, [[CPUS[1]]])
    assert (work.__name__, work.__doc__) == ("work", "What it does.")


def test_what_suspends_cannot_be_decorated() -> None:
    async def coroutine() -> None: ...

    def generator() -> Iterator[None]:
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="suspends while it runs"):
            pin([CPUS[0]])(function)


@needs_two_cpus
def test_an_exception_leaves_a_pin() -> None:
    before = allowed(threading.get_native_id())
    with pytest.raises(ZeroDivisionError), pin([CPUS[0]]):
        raise ZeroDivisionError
    assert allowed(threading.get_native_id()) == before


@needs_two_cpus
def test_one_pin_in_several_threads_at_once() -> None:
    """Each thread has its own binding, and what it changes is no default for others."""
    pinned, together = pin([CPUS[1]]), threading.Barrier(4)

    def work(_: int) -> tuple[list[list[int]], bool]:
        before = allowed(threading.get_native_id())
        with pinned:
            together.wait()
            inside = team_cpus()
            together.wait()
        return inside, allowed(threading.get_native_id()) == before

    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(work, range(4))) == [([[CPUS[1]]], True)] * 4


@needs_two_cpus
def test_other_threads_keep_their_number_of_threads() -> None:
    default = in_thread(torch.get_num_threads)
    with pin([CPUS[0]]):
        assert in_thread(torch.get_num_threads) == default


def cpu_times(threads: list[int]) -> list[int]:
    fields = [pathlib.Path(f"/proc/self/task/{thread}/schedstat").read_text().split() for thread in threads]
    return [int(each[0]) for each in fields]


@needs_two_cpus
def test_torch_and_xopt_run_on_the_team_that_is_bound() -> None:
    """No operator brings threads beyond the team, and all of the team do work."""
    packed = torch.ops.xopt.linear_pack(torch.randn(512, 512), dtype=torch.float32)
    works = {
        "torch": lambda: torch.randn(1 << 20).exp(),
        "xopt": lambda: torch.ops.xopt.linear(torch.randn(512, 512), packed, 512),
    }

    def work() -> None:
        set_own_threads(3)
        bound = [thread for thread, _ in _C.bind_team([CPUS[1]], {})]
        assert len(bound) == 3
        tasks = set(os.listdir("/proc/self/task"))
        for name, call in works.items():
            started = cpu_times(bound)
            for _ in range(5):
                call()
            idle = [thread for thread, then, now in zip(bound, started, cpu_times(bound), strict=True) if now == then]
            assert not idle, f"{name} does not run on {idle}, threads of the team that is bound"
        assert not set(os.listdir("/proc/self/task")) - tasks
        assert team_cpus() == [[CPUS[1]]] * 3

    in_thread(work)


@needs_two_cpus
def test_masks_of_single_threads_are_restored() -> None:
    """A team whose threads had masks of their own, as OMP_PROC_BIND makes them, has them again after a pin."""

    def work() -> None:
        set_own_threads(2)
        first, second = team()
        _C.bind_team(CPUS, {second: CPUS[:1]})
        with pin(CPUS[-2:]):
            assert team_cpus() == [CPUS[-2:]] * 2
        assert _C.team_masks() == [(first, CPUS), (second, CPUS[:1])]

    in_thread(work)


@needs_two_cpus
def test_cores_that_linux_drops_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where a control group's cpuset has only some of them: the masks are read back."""
    real = _C.team_masks
    monkeypatch.setattr(_C, "team_masks", lambda: [(thread, cpus[:-1]) for thread, cpus in real()])
    with pytest.raises(ValueError, match="control group's cpuset"), pin(CPUS):
        raise AssertionError("inside")
    monkeypatch.undo()


def test_cores_that_linux_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "online_cpus", lambda: tuple(range(9000)))
    refused = r"does not let this process run on \[5000\], but on \[\d.*Invalid argument"
    with pytest.raises(ValueError, match=refused), pin([5000]):
        raise AssertionError("inside")
    with pytest.raises(ValueError, match="CPU 8500 cannot be"), pin([8500]):
        raise AssertionError("inside")


def test_a_torch_without_openmp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool")
    with pytest.raises(RuntimeError, match="does not run on OpenMP"), pin(CPUS[:1]):
        raise AssertionError("inside")


def test_two_openmp_runtimes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "openmp_threads", lambda: 77)
    with pytest.raises(RuntimeError, match=r"different OpenMP runtimes.*xopt: .*lib(gomp|iomp5|omp)"), pin(CPUS[:1]):
        raise AssertionError("inside")


def intel_openmp() -> str:
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "libiomp5.so" and pathlib.Path(str(file.locate())).exists():
            return str(pathlib.Path(str(file.locate())).resolve())
    return ctypes.util.find_library("iomp5") or ""


@needs_two_cpus
def test_with_intels_openmp() -> None:
    """The pinning and task tests once more, on the other runtime."""
    library = intel_openmp()
    if not library:
        pytest.skip("NOT RUN: libiomp5.so is not installed (package intel-openmp)")
    chosen = "pin or task or restores or team"
    done = fresh_process.run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_core_pool.py", "tests/test_task.py"),
        *("-k", f"({chosen}) and not intels and not node"),
        LD_PRELOAD=library,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "libiomp5" in fresh_process.output_of("import xopt; print(xopt._C.openmp_library())", LD_PRELOAD=library)
