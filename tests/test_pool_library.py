"""libxopt_pool.so by itself: blocks are reused, bounded and counted, and none is ever lent twice.

The library has to be there from the start of a process, so each test runs a program of its own, which talks to the C
interface: without torch it takes a fraction of a second.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import textwrap
from typing import Any

import pytest

from tests import fresh_process
from tests.test_sanitizer import sanitizer_is_loaded
from xopt.runtime import POOL_LIBRARY

pytestmark = pytest.mark.skipif(sanitizer_is_loaded(), reason="NOT RUN: a sanitizer brings a malloc of its own")

# The allocation functions and the pool's own, without torch.
BARE = """
import ctypes, json, os, random, threading

class Counters(ctypes.Structure):
    names = ("live", "cached", "peak", "hits", "misses", "refused")
    _fields_ = [(name, ctypes.c_uint64) for name in names]

process = ctypes.CDLL(None)
for name in ("malloc", "realloc", "aligned_alloc", "memalign"):
    getattr(process, name).restype = ctypes.c_void_p
process.malloc_usable_size.restype = ctypes.c_size_t
process.xopt_pool_trim.restype = ctypes.c_uint64
size, pointer = ctypes.c_size_t, ctypes.c_void_p
KB, MB = 1 << 10, 1 << 20

def malloc(bytes_): return process.malloc(size(bytes_))
def free(block): process.free(pointer(block))
def realloc(block, bytes_): return process.realloc(pointer(block), size(bytes_))
def usable(block): return process.malloc_usable_size(pointer(block))
def switch(on, limit=2**64 - 1): return process.xopt_pool_set(on, ctypes.c_uint64(limit))
def trim(keep=0): return process.xopt_pool_trim(ctypes.c_uint64(keep))

def counters():
    now = Counters()
    process.xopt_pool_statistics(ctypes.byref(now))
    return {name: getattr(now, name) for name in Counters.names}

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

def fill(block, bytes_, value): ctypes.memset(block, value, bytes_)
def holds(block, bytes_, value): return ctypes.string_at(block, bytes_) == bytes([value]) * bytes_
"""


def bare(program: str) -> Any:
    """What the program printed, as JSON."""
    return json.loads(fresh_process.output_of(BARE + textwrap.dedent(program), LD_PRELOAD=str(POOL_LIBRARY)))


def test_the_library_needs_libc_alone() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("NOT RUN: there is no readelf")
    done = subprocess.run(["readelf", "-d", str(POOL_LIBRARY)], capture_output=True, text=True, check=True)
    needed = [line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line]
    assert [name for name in needed if not name.startswith(("libc.so", "libdl.so", "libpthread.so"))] == []
    assert needed


def test_programs_run_as_ever_under_the_library() -> None:
    for program in (["/bin/sh", "-c", "echo fine"], ["/bin/ls", "-d", "/"]):
        done = subprocess.run(program, capture_output=True, text=True, env={"LD_PRELOAD": str(POOL_LIBRARY)})
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


def test_large_blocks_are_reused_and_counted() -> None:
    said = bare("""
        before = counters()
        block = malloc(5 * MB)
        fill(block, 5 * MB, 1)
        taken = counters()
        free(block)
        freed = counters()
        again = malloc(5 * MB)
        fill(again, 5 * MB, 2)
        small = [malloc(100 * KB) for _ in range(20)]
        print(json.dumps([before, taken, freed, counters(), again == block, usable(again), [usable(s) for s in small]]))
    """)
    before, taken, freed, again, same, usable, small = said
    assert 5 << 20 <= taken["live"] - before["live"] <= (5 << 20) + (16 << 10)
    assert taken["misses"] == before["misses"] + 1
    assert freed["live"] == before["live"]
    assert freed["cached"] >= 5 << 20
    assert freed["peak"] >= taken["live"]
    assert again["hits"] == taken["hits"] + 1
    assert same
    assert usable >= 5 << 20
    assert all(100 << 10 <= each < 128 << 10 for each in small)


def test_memory_goes_back_with_trim() -> None:
    said = bare("""
        blocks = [malloc(10 * MB) for _ in range(8)]
        for block in blocks: fill(block, 10 * MB, 1)
        full = resident()
        for block in blocks[::2]: free(block)
        kept = resident()
        part = trim(keep=20 * MB), resident()
        whole = trim(), resident()
        intact = all(holds(block, 10 * MB, 1) for block in blocks[1::2])
        for block in blocks[1::2]: free(block)
        given = [full - kept, part, kept - part[1], whole, kept - whole[1]]
        print(json.dumps([*given, intact, trim(), counters()["cached"]]))
    """)
    given_early, part, from_part, whole, from_whole, intact, last, cached = said
    assert given_early < 1 << 20
    assert 12 << 20 <= part[0] <= 24 << 20
    assert abs(from_part - part[0]) < 2 << 20
    assert 28 << 20 <= part[0] + whole[0] <= 42 << 20
    assert abs(from_whole - part[0] - whole[0]) < 2 << 20
    assert intact
    assert last >= 36 << 20
    assert cached < 8 << 20


def test_the_bound_holds_and_kept_memory_makes_room_for_what_is_wanted() -> None:
    """Blocks of ever new sizes: what is kept of the old ones has to go, since it may not be held beside the new."""
    said = bare("""
        trim()
        limit = counters()["live"] + counters()["cached"] + 64 * MB
        switch(1, limit)
        most, refused = 0, counters()["refused"]
        for step in range(1, 60):
            block = malloc(step * MB)
            fill(block, step * MB, 1)
            beside = malloc(200 * KB)
            now = counters()
            most = max(most, now["live"] + now["cached"])
            free(block)
            free(beside)
        fits = counters()["refused"] == refused
        too_much = limit - counters()["live"] + MB
        large = malloc(too_much)
        fill(large, too_much, 3)
        now = counters()
        print(json.dumps([most <= limit, fits, now["refused"] - refused, now["live"] + now["cached"] <= limit]))
        free(large)
    """)
    assert said == [True, True, 1, True]


def test_switched_off_it_only_takes_back() -> None:
    said = bare("""
        block = malloc(5 * MB)
        fill(block, 5 * MB, 9)
        live = counters()["live"]
        switch(0)
        other = malloc(5 * MB)
        unchanged = counters()["live"] == live
        intact = holds(block, 5 * MB, 9)
        moved = realloc(block, 50 * MB)
        kept = holds(moved, 5 * MB, 9)
        gone = live - counters()["live"]
        free(moved); free(other)
        print(json.dumps([unchanged, intact, kept, gone >= 5 * MB, switch(1)]))
    """)
    assert said == [True, True, True, True, 0]


def test_realloc_keeps_the_contents() -> None:
    said = bare("""
        right = []
        for old in (10, 200 * KB, 3 * MB):
            for new in (20, 100 * KB, 150 * KB, 190 * KB, 2 * MB, 3 * MB + 5, 40 * MB):
                block = malloc(old)
                fill(block, old, 5)
                moved = realloc(block, new)
                right.append(holds(moved, min(old, new), 5) and usable(moved) >= new)
                free(moved)
        block = malloc(3 * MB)
        live = counters()["live"]
        null = realloc(block, 0)
        freed = live - counters()["live"] >= 3 * MB
        print(json.dumps([all(right), null, freed, usable(realloc(None, 2 * MB)) >= 2 * MB]))
    """)
    assert said == [True, None, True, True]


def test_alignment() -> None:
    said = bare("""
        right = []
        for bytes_ in (64, 130 * KB, 3 * MB):
            for power in range(3, 24):
                for call in (process.aligned_alloc, process.memalign):
                    block = call(size(1 << power), size(max(bytes_, 1 << power)))
                    right.append(block % (1 << power) == 0)
                    free(block)
                result = pointer()
                code = process.posix_memalign(ctypes.byref(result), size(1 << power), size(bytes_))
                right.append(code == 0 and result.value % (1 << power) == 0)
                free(result.value)
        wrong = [process.posix_memalign(ctypes.byref(pointer()), size(each), size(MB)) for each in (0, 4, 24, 3 * 8)]
        huge = [malloc(1 << 60), process.posix_memalign(ctypes.byref(pointer()), size(64), size(1 << 60))]
        print(json.dumps([all(right), wrong, huge]))
    """)
    assert said == [True, [22] * 4, [None, 12]]


def test_what_is_no_block_is_left_alone() -> None:
    """A second free of a block, or one of an address inside of it, changes nothing."""
    said = bare("""
        block, other = malloc(MB), malloc(MB)
        fill(other, MB, 1)
        live = counters()["live"]
        for inside in (64, 16 * KB, 32 * KB): free(block + inside)
        unchanged = counters()["live"] == live
        free(block); free(block)
        once = live - counters()["live"]
        first, second = malloc(MB), malloc(MB)
        free(None)
        print(json.dumps([unchanged, once, first != second, holds(other, MB, 1)]))
    """)
    assert said == [True, 1 << 20, True, True]


@pytest.mark.parametrize(("seed", "bound", "refuses"), [(0, None, False), (1, 400 << 20, False), (2, 8 << 20, True)])
def test_no_memory_is_lent_twice(seed: int, bound: int | None, refuses: bool) -> None:
    """Blocks of all sizes come, change and go in random order on four threads; each keeps its bytes."""
    said = bare(f"""
        trim()
        start = counters()
        bound = {bound} and {bound} + start["live"] + start["cached"]
        switch(1, bound or 2**64 - 1)
        wrong, most = [], []

        def work(seed):
            draw, alive = random.Random(seed), []
            for step in range(400):
                value = draw.randrange(256)
                if alive and draw.random() < 0.5:
                    block, bytes_, held = alive.pop(draw.randrange(len(alive)))
                    if not holds(block, bytes_, held): wrong.append(step)
                    if draw.random() < 0.7:
                        free(block)
                        continue
                    now = int(draw.choice([1000, 150 * KB, bytes_ * 1.3, bytes_ / 3 + 1]))
                    block = realloc(block, now)
                    if not holds(block, min(bytes_, now), held): wrong.append(step)
                    bytes_ = now
                else:
                    bytes_ = int(2 ** draw.uniform(10, 22))
                    block = malloc(bytes_)
                fill(block, bytes_, value)
                alive.append((block, bytes_, value))
                if step % 50 == 0:
                    if draw.random() < 0.5: trim(draw.randrange(10 * MB))
                    now = counters()
                    most.append(now["live"] + now["cached"])
            for block, bytes_, held in alive:
                if not holds(block, bytes_, held): wrong.append("end")
                free(block)

        threads = [threading.Thread(target=work, args=(4 * {seed} + each,)) for each in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        end = counters()
        trim()
        print(json.dumps([wrong, bound is None or max(most) <= bound, end["live"] - start["live"],
                          counters()["cached"] // MB, end["hits"] > 100, end["refused"] > 0]))
    """)
    wrong, bounded, left, cached, hits, refused = said
    assert wrong == []
    assert bounded
    assert abs(left) < 1 << 20  # Python's own large blocks
    assert cached < 8
    assert hits
    assert refused == refuses


def test_forks_while_other_threads_allocate() -> None:
    """No child finds the pool locked, and what it does is its own."""
    said = bare("""
        going = True
        def work():
            while going:
                block = malloc(300 * KB)
                free(block)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads: thread.start()
        kept = malloc(2 * MB)
        fill(kept, 2 * MB, 1)
        codes = []
        for _ in range(30):
            child = os.fork()
            if child == 0:
                block = malloc(MB)
                fill(block, MB, 7)
                fill(kept, 2 * MB, 2)
                os._exit(0 if block and holds(kept, 2 * MB, 2) else 3)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        going = False
        for thread in threads: thread.join()
        print(json.dumps([codes, holds(kept, 2 * MB, 1)]))
    """)
    assert said == [[0] * 30, True]


def test_blocks_lie_on_huge_pages() -> None:
    """Whether the system grants them is its own affair; the flag `hg` of the mapping tells that it was asked."""
    if not pathlib.Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("NOT RUN: this kernel has no transparent huge pages")
    said = bare("""
        block, flags, inside = malloc(4 * MB), "", False
        for line in open("/proc/self/smaps"):
            name = line.split()[0]
            if "-" in name:
                first, last = (int(each, 16) for each in name.split("-"))
                inside = first <= block < last
            elif inside and name == "VmFlags:":
                flags = line.split()[1:]
        print(json.dumps(flags))
    """)
    assert "hg" in said


def test_without_address_space_malloc_is_as_it_was() -> None:
    """The library starts while there is none, under a limit like `ulimit -v`."""
    program = """
        import ctypes, json
        process = ctypes.CDLL(None)
        process.malloc.restype = ctypes.c_void_p
        print(json.dumps([process.malloc(ctypes.c_size_t(1 << 20)) is not None,
                          process.xopt_pool_set(1, ctypes.c_uint64(1 << 30))]))
    """
    limited = f"""
        import resource, subprocess, sys
        limits = (60 << 20, 60 << 20)
        done = subprocess.run(
            [sys.executable, "-S", "-c", {textwrap.dedent(program)!r}], capture_output=True, text=True,
            env={{"LD_PRELOAD": {str(POOL_LIBRARY)!r}}},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits))
        print(done.stdout or done.stderr)
    """
    assert json.loads(fresh_process.output_of(limited)) == [True, -1]
