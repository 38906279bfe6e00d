"""The runtime under the kernels: threads, fork, scratch memory and the memory of packed weights."""

from __future__ import annotations

import ctypes
import gc
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests import fresh_process
from tests.test_sanitizer import sanitizer_is_loaded
from xopt import _C
from xopt._C import testing

MB = 1 << 20
PAGE = 2 * MB

not_when_sanitized = pytest.mark.skipif(
    sanitizer_is_loaded(), reason="NOT RUN: under AddressSanitizer each piece of memory is an allocation of its own"
)


# ---- Threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_max_threads_follows_torch(threads: int, torch_threads: None) -> None:
    torch.set_num_threads(threads)
    assert _C.max_threads() == threads


def test_max_threads_follows_torch_in_a_new_python_thread() -> None:
    """torch itself tells OpenMP only when that thread first runs a parallel op."""
    program = """
        import threading, torch, xopt
        from xopt import _C
        torch.set_num_threads(3)
        thread = threading.Thread(target=lambda: print(_C.max_threads()))
        thread.start()
        thread.join()
    """
    assert fresh_process.output_of(program) == "3"


@pytest.mark.sanitize
@pytest.mark.parametrize("threads", [0, 1, 2, 5, 16])
def test_a_region_runs_each_thread_once(threads: int) -> None:
    count = max(threads, 1)
    assert testing.region_members([threads]) == [[(thread, count) for thread in range(count)]]


@pytest.mark.sanitize
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_regions_of_a_team(threads: int, torch_threads: None) -> None:
    """A team has as many threads as torch says, however many a region asks for."""
    torch.set_num_threads(threads)
    wanted = [0, 1, 2, 3, 8, 2, 16, 1, 5] * 20
    counts = [min(max(each, 1), threads) for each in wanted]
    members = testing.region_members(wanted, team=True)
    assert members == [[(thread, count) for thread in range(count)] for count in counts]
    assert testing.region_members([], team=True) == []


@pytest.mark.parametrize("team", [False, True])
def test_a_region_in_a_region_is_serial(team: bool) -> None:
    assert testing.nested_region(4, team) == (1, 1)


def test_after_a_region_max_threads_is_back_at_its_value() -> None:
    before = _C.max_threads()
    for team in (False, True):
        testing.nested_region(2, team)
        assert _C.max_threads() == before


@pytest.mark.sanitize
@pytest.mark.parametrize("team", [False, True])
@pytest.mark.parametrize("thrower", [0, 1, 3, -1])
def test_an_exception_of_any_thread_reaches_the_caller(thrower: int, team: bool, torch_threads: None) -> None:
    torch.set_num_threads(4)
    with pytest.raises(RuntimeError, match="thrown by thread " + (r"\d" if thrower < 0 else str(thrower))):
        testing.throwing_region(4, thrower, team)
    assert len(testing.region_members([4], team)[0]) == 4


@pytest.mark.sanitize
@pytest.mark.parametrize("team", [False, True])
def test_regions_of_several_python_threads_at_once(team: bool, torch_threads: None) -> None:
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        members = list(pool.map(lambda _: testing.region_members([2, 2], team), range(50)))
    assert all(each == [[(0, 2), (1, 2)]] * 2 for each in members)


def test_ops_of_several_python_threads_at_once() -> None:
    x, weight = torch.randn(64, 256), torch.randn(192, 256)
    packed = torch.ops.xopt.linear_pack(weight, dtype=torch.float32)
    expected = torch.ops.xopt.linear(x, packed, 192)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: torch.ops.xopt.linear(x, packed, 192), range(40)))
    assert all(torch.equal(result, expected) for result in results)


# ---- Fork -----------------------------------------------------------------------------------------------------------

# What the child gets has to be what the parent got, and it must not wait for threads that it does not have. It leaves
# comparing to the parent: torch's own ops do wait for them.
FORK = """
import os, sys, torch, xopt
from xopt import _C
torch.manual_seed(0)
torch.set_num_threads(2)
x, weight = torch.randn(300, 256), torch.randn(512, 256)
packed = torch.ops.xopt.linear_pack(weight, dtype=torch.bfloat16)

def work():
    return torch.ops.xopt.linear(x, packed, 512)

{before}
child = os.fork()
if child == 0:
    {in_child}
    torch.save((work(), _C.max_threads(), _C.testing.region_members([2])[0]), sys.argv[1])
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
result, threads, members = torch.load(sys.argv[1])
assert torch.equal(result, work())
assert _C.max_threads() == 2
print(threads, members)
"""


def fork_after(before: str, tmp_path: object, in_child: str = "") -> str:
    program = FORK.format(before=before, in_child=in_child or "pass")
    done = fresh_process.run("-c", program, f"{tmp_path}/result.pt")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_fork_after_an_op(tmp_path: object) -> None:
    assert fork_after("work()", tmp_path) == "1 [(0, 1)]"


def test_fork_after_only_torch_has_used_threads(tmp_path: object) -> None:
    assert fork_after("torch.nn.functional.linear(x.repeat(20, 1), weight).exp()", tmp_path) == "1 [(0, 1)]"


def test_fork_of_a_child(tmp_path: object) -> None:
    """A grandchild has no worker threads either."""
    middle = "grandchild = os.fork(); grandchild and os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))"
    assert fork_after("work()", tmp_path, in_child=middle) == "1 [(0, 1)]"


# ---- Scratch memory -------------------------------------------------------------------------------------------------


@pytest.fixture
def arena_limit() -> Iterator[Callable[[int], None]]:
    yield _C.set_arena_limit
    _C.set_arena_limit(-1)


@pytest.mark.sanitize
def test_scratch_is_aligned_and_no_two_pieces_overlap() -> None:
    """`scratch_pieces` itself fills the pieces and fails where one was overwritten."""
    draw = random.Random(5)
    for _ in range(20):
        sizes = [draw.choice([0, 1, 63, 64, 65, 4096, 100_000, 3 * MB]) for _ in range(draw.randrange(1, 12))]
        addresses = testing.scratch_pieces(sizes)
        assert all(address % 64 == 0 for address in addresses)
        assert len(set(addresses)) == len(addresses)


@not_when_sanitized
def test_scratch_is_reused() -> None:
    program = """
        import xopt
        from xopt import _C
        sizes = [1000, 3 << 20, 10, 5 << 20]
        first, held = _C.testing.scratch_pieces(sizes), _C.arena_bytes()
        again = [_C.testing.scratch_pieces(sizes) for _ in range(10)]
        print(held >> 20, _C.arena_bytes() == held, again == [first] * 10)
    """
    # 2 MB for the first piece, 4 for the next two, 6 for the last.
    assert fresh_process.output_of(program) == "12 True True"


@not_when_sanitized
def test_scratch_that_is_outgrown_is_given_back() -> None:
    """Growing requests leave one chunk of the largest size behind, not one of each."""
    program = """
        import xopt
        from xopt import _C
        for size in range(1, 20):
            _C.testing.scratch_pieces([size << 20])
        print(_C.arena_bytes() >> 20)
    """
    assert fresh_process.output_of(program) == "20"


def test_scratch_ends_with_its_thread() -> None:
    """join() returns a little before the system's thread, and with it the arena, is gone."""
    program = """
        import pathlib, threading, xopt
        from xopt import _C
        before = _C.arena_bytes()
        for _ in range(5):
            thread = threading.Thread(target=_C.testing.scratch_pieces, args=([7 << 20],))
            thread.start()
            task = pathlib.Path(f"/proc/self/task/{thread.native_id}")
            thread.join()
            while task.exists():
                pass
        print(_C.arena_bytes() - before)
    """
    assert fresh_process.output_of(program) == "0"


@pytest.mark.sanitize
def test_scratch_can_be_made_to_fail(arena_limit: Callable[[int], None]) -> None:
    arena_limit(1 * MB)
    with pytest.raises(MemoryError, match=f"no scratch memory for {MB} bytes"):
        testing.scratch_pieces([100, MB])
    testing.scratch_pieces([100, 1000])
    arena_limit(-1)
    testing.scratch_pieces([100, MB])


@pytest.mark.parametrize("bytes_", [1 << 49, 1 << 62, (1 << 64) - 1])
@not_when_sanitized
def test_scratch_of_absurd_size(bytes_: int) -> None:
    with pytest.raises(MemoryError, match="scratch"):
        testing.scratch_pieces([10, bytes_])
    testing.scratch_pieces([10, 20])


def test_an_op_without_scratch_raises_and_the_next_call_works(arena_limit: Callable[[int], None]) -> None:
    x, weight = torch.randn(64, 512), torch.randn(64, 512)
    packed = torch.ops.xopt.linear_pack(weight, dtype=torch.bfloat16)
    expected = torch.ops.xopt.linear(x, packed, 64)
    arena_limit(0)
    with pytest.raises(Exception, match="scratch"):
        torch.ops.xopt.linear(x, packed, 64)
    arena_limit(-1)
    assert torch.equal(torch.ops.xopt.linear(x, packed, 64), expected)


# ---- Memory of packed weights ---------------------------------------------------------------------------------------


@pytest.fixture
def no_weights_left() -> Iterator[None]:
    gc.collect()  # else what earlier tests left may be freed in between
    before = _C.weight_bytes()
    yield
    assert _C.weight_bytes() == before


def fill(address: int, size: int, value: int) -> None:
    ctypes.memset(address, value, size)


def holds(address: int, size: int, value: int) -> bool:
    return ctypes.string_at(address, size) == bytes([value]) * size


@not_when_sanitized
@pytest.mark.usefixtures("no_weights_left")
def test_small_weights_share_pages() -> None:
    before = _C.weight_bytes()
    weights = [testing.weight_alloc(64 << 10) for _ in range(100)]
    assert _C.weight_bytes() - before <= 4 * PAGE + PAGE
    for weight in weights:
        testing.weight_free(weight)


@not_when_sanitized
@pytest.mark.usefixtures("no_weights_left")
def test_a_small_weight_does_not_keep_the_memory_of_its_neighbours() -> None:
    before = _C.weight_bytes()
    large = testing.weight_alloc(20 * MB)
    small = testing.weight_alloc(1000)
    fill(large, 20 * MB, 1)
    fill(small, 1000, 2)
    testing.weight_free(large)
    assert _C.weight_bytes() - before <= PAGE
    assert holds(small, 1000, 2)
    testing.weight_free(small)


def resident_share(address: int, size: int) -> float:
    """Of the pages of 4 KB that lie in this range."""
    first = -(-address // 4096) * 4096
    told = (ctypes.c_ubyte * ((address + size - first) // 4096))()
    assert (
        ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(first), ctypes.c_size_t(4096 * len(told)), told) == 0
    )
    return sum(page & 1 for page in told) / len(told)


@not_when_sanitized
@pytest.mark.usefixtures("no_weights_left")
def test_the_memory_of_a_gap_between_weights_is_given_back() -> None:
    """Also where the weights beside it lie on the same 2 MB."""
    sizes = (400 << 10, 500 << 10, 300 << 10, 200 << 10)
    weights = [testing.weight_alloc(size) for size in sizes]
    for value, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        fill(weight, size, value)
    assert resident_share(weights[1], sizes[1]) == 1
    testing.weight_free(weights[2])
    testing.weight_free(weights[1])
    assert resident_share(weights[1], sizes[1]) == resident_share(weights[2], sizes[2]) == 0
    assert holds(weights[0], sizes[0], 0)
    assert holds(weights[3], sizes[3], 3)
    again = testing.weight_alloc(700 << 10)
    fill(again, 700 << 10, 7)
    assert holds(again, 700 << 10, 7)
    for weight in (weights[0], weights[3], again):
        testing.weight_free(weight)


@not_when_sanitized
def test_a_weight_goes_into_the_gap_that_fits_best() -> None:
    """In a process that has no other weights, whose gaps might fit better."""
    program = """
        from xopt._C import testing
        MB = 1 << 20
        sizes = (5 * MB, 1000, 3 * MB, 1000, 4 * MB, 1000)
        weights = [testing.weight_alloc(size) for size in sizes]
        for place in (0, 2, 4):
            testing.weight_free(weights[place])
        again = [testing.weight_alloc(size) for size in (3 * MB, 4 * MB, 4 * MB)]
        print([weights.index(address) for address in again])
    """
    assert fresh_process.output_of(program) == "[2, 4, 0]"


@pytest.mark.sanitize
@pytest.mark.usefixtures("no_weights_left")
def test_weights_keep_their_bytes_whatever_is_freed_around_them() -> None:
    draw = random.Random(3)
    alive: list[tuple[int, int, int]] = []
    for step in range(400):
        if alive and draw.random() < 0.45:
            address, size, value = alive.pop(draw.randrange(len(alive)))
            assert holds(address, size, value)
            testing.weight_free(address)
            continue
        size = draw.choice([0, 1, 100, 5000, 300_000, PAGE, PAGE + 1, 3 * MB])
        address = testing.weight_alloc(size)
        assert address % 64 == 0
        fill(address, size, step % 251)
        alive.append((address, size, step % 251))
    for address, size, value in alive:
        assert holds(address, size, value)
        testing.weight_free(address)


@pytest.mark.sanitize
@pytest.mark.usefixtures("no_weights_left")
def test_weights_of_several_threads_at_once() -> None:
    def work(value: int) -> bool:
        intact = True
        for _ in range(50):
            weights = [testing.weight_alloc(10_000) for _ in range(4)]
            for weight in weights:
                fill(weight, 10_000, value)
            intact = intact and all(holds(weight, 10_000, value) for weight in weights)
            for weight in weights:
                testing.weight_free(weight)
        return intact

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@not_when_sanitized
def test_weights_ask_for_huge_pages() -> None:
    """Whether the system grants them is its own affair; the flag `hg` of the mapping tells that it was asked."""
    weight = testing.weight_alloc(3 * MB)
    try:
        assert "hg" in mapping_flags(weight)
    finally:
        testing.weight_free(weight)


def mapping_flags(address: int) -> list[str]:
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if bounds:
                inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
            elif inside and line.startswith("VmFlags:"):
                return line.split()[1:]
    return []


@not_when_sanitized
def test_what_is_no_weight_cannot_be_freed() -> None:
    weight = testing.weight_alloc(1000)
    for address in (weight + 64, 64, id(weight)):
        with pytest.raises(ValueError, match="weight_free"):
            testing.weight_free(address)
    testing.weight_free(weight)
    with pytest.raises(ValueError, match="weight_free"):
        testing.weight_free(weight)
    testing.weight_free(0)


@not_when_sanitized
@pytest.mark.parametrize("bytes_", [1 << 49, 1 << 62, (1 << 64) - 1])
def test_weight_of_absurd_size(bytes_: int) -> None:
    with pytest.raises(MemoryError):
        testing.weight_alloc(bytes_)


@pytest.mark.usefixtures("no_weights_left")
def test_a_packed_weight_is_freed_with_its_tensor() -> None:
    before = _C.weight_bytes()
    packed = torch.ops.xopt.linear_pack(torch.randn(1024, 1024), dtype=torch.float32)
    part = packed[10:20]
    assert _C.weight_bytes() >= before + 4 * MB
    del packed
    assert _C.weight_bytes() >= before + 4 * MB
    del part
    assert _C.weight_bytes() == before


@not_when_sanitized
@pytest.mark.usefixtures("no_weights_left")
def test_gaps_between_weights_are_used_again() -> None:
    before = _C.weight_bytes()
    first, kept = testing.weight_alloc(8 * MB), testing.weight_alloc(1000)
    testing.weight_free(first)
    again = [testing.weight_alloc(2 * MB) for _ in range(4)]
    assert _C.weight_bytes() - before <= 5 * PAGE
    fill(kept, 1000, 3)
    for address in again:
        fill(address, 2 * MB, 4)
    assert holds(kept, 1000, 3)
    for address in (kept, *again):
        testing.weight_free(address)


@not_when_sanitized
def test_a_weight_packed_where_another_was_is_as_good() -> None:
    """Padding, too, is written: memory that is used again is not zero. In a process of its own, where no other test has
    left gaps that would be used before this one."""
    program = """
        import ctypes
        import torch
        from xopt import _C, ops
        weight = torch.randn(37, 75)
        fresh = torch.ops.xopt.linear_pack(weight, dtype=torch.bfloat16)
        kept = [_C.testing.weight_alloc(64) for _ in range(2)]
        gap = _C.testing.weight_alloc(64 << 10)
        kept.append(_C.testing.weight_alloc(64))
        ctypes.memset(gap, 255, 64 << 10)
        _C.testing.weight_free(gap)
        again = torch.ops.xopt.linear_pack(weight, dtype=torch.bfloat16)
        print(gap <= again.data_ptr() < gap + (64 << 10), torch.equal(again, fresh))
    """
    assert fresh_process.output_of(program) == "True True"
