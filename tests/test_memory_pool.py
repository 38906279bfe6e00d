"""The memory pool: page faults vanish, what it counts is right, and no block is ever lent twice.

libxopt_pool.so has to be there from the start of a process, so most tests run programs of their own. Those that need
no torch talk to the library's C interface, and take a fraction of a second.
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
from xopt.runtime import memory_pool
from xopt.runtime.memory_pool import LIBRARY

pytestmark = pytest.mark.skipif(sanitizer_is_loaded(), reason="NOT RUN: a sanitizer brings a malloc of its own")

# Convolutions whose activations are 37 MB each; a forward on 4 KB pages takes tens of thousands of faults.
FORWARD = """
import json, os, resource, threading, torch, xopt
from xopt.runtime import memory_pool

torch.manual_seed(0)
convolutions = torch.nn.Conv2d(3, 12, 3, padding=1), torch.nn.Conv2d(12, 12, 3, padding=1)
model = torch.nn.Sequential(convolutions[0], torch.nn.SiLU(), convolutions[1]).eval()
image = torch.randn(1, 3, 896, 896)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def forward_faults():
    with torch.inference_mode():
        before = faults()
        result = model(image)
        return faults() - before, result

def steady_faults():
    return min(forward_faults()[0] for _ in range(2))
"""


def output_of(program: str, *, preloaded: bool = True) -> Any:
    """What the program printed, as JSON."""
    environment = {"LD_PRELOAD": str(LIBRARY)} if preloaded else {}
    return json.loads(fresh_process.output_of(program, **environment))


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
    return output_of(BARE + textwrap.dedent(program))


# ---- Page faults ----------------------------------------------------------------------------------------------------


PRELOADED = (
    FORWARD
    + """
import ctypes
MB = 1 << 20

def faults_of_a_forward():
    pool = memory_pool(preloaded=True)
    ctypes.CDLL(None).xopt_pool_set(0, ctypes.c_uint64(0))
    without, exact = forward_faults()
    with pool:
        forward_faults()
        steady, started = steady_faults(), pool.statistics()
        in_thread = []
        thread = threading.Thread(target=lambda: in_thread.append(steady_faults()))
        thread.start()
        thread.join()
        result = forward_faults()[1]
        ended = pool.statistics()
    ctypes.CDLL(None).xopt_pool_set(0, ctypes.c_uint64(0))
    pool.trim()
    left = pool.statistics()
    ctypes.CDLL(None).xopt_pool_set(1, ctypes.c_uint64(2**64 - 1))
    return {
        "without": without, "steady": steady, "in_thread": in_thread[0],
        "hits": ended.hits - started.hits, "misses": ended.misses - started.misses,
        "live": ended.live_bytes, "peak": ended.peak_bytes, "cached": [ended.cached_bytes, left.cached_bytes],
        "bytes": result.numel() * 4, "same": torch.equal(result, exact), "backend": pool.backend,
        "allocator": xopt.capabilities().allocator,
    }

def held(pool):
    now = pool.statistics()
    return (now.live_bytes + now.cached_bytes) // MB

def tensors():
    return [torch.ones(4 * MB) for _ in range(8)]  # 16 MB each

def bounds_and_fork():
    said = {}
    whole = memory_pool()
    whole.trim()
    whole.start()
    with memory_pool(64 * MB) as bounded:
        made = tensors()
        said["bounded"] = held(bounded) <= 64, bounded.statistics().refused >= 4
        with memory_pool(256 * MB) as inner:
            made += tensors()
            said["tightest bound holds"] = held(inner) <= 64, inner.statistics().refused >= 8
    made += tensors()
    said["no bound"] = held(whole) >= 32 + 128, whole.statistics().refused == 0
    torch.set_num_threads(1)  # torch's own parallel operators wait for their threads in a forked child
    child = os.fork()
    if child == 0:
        before = [tensor.numpy().sum() for tensor in made]
        made[0].numpy()[:] = 7
        fresh = tensors()
        right = all(each == 4 * MB for each in before) and all(tensor.numpy().min() == 1 for tensor in fresh)
        del fresh
        whole.trim()
        os._exit(0 if right else 3)
    said["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0,
    whole.stop()
    said["tensors"] = all(tensor.sum() == 4 * MB for tensor in made),
    del made
    said["given back"] = whole.trim() > 128 * MB, held(whole) < 32
    return said

print(json.dumps([faults_of_a_forward(), bounds_and_fork()]))
"""
)


@pytest.fixture(scope="module")
def said_with_torch() -> Any:
    """Of one process for two tests: torch takes seconds to import."""
    return output_of(PRELOADED)


def test_the_preloaded_pool_removes_page_faults(said_with_torch: Any) -> None:
    """Also in a thread other than the main one; and what is made in the pool outlives it."""
    said = said_with_torch[0]
    assert (said["backend"], said["allocator"]) == ("preload", "xopt_pool")
    assert said["without"] > 10_000
    assert said["steady"] < said["without"] / 100
    assert said["in_thread"] < said["without"] / 100
    assert said["hits"] >= 9
    assert said["misses"] == 0
    assert said["live"] >= said["bytes"]
    assert said["peak"] >= 2 * said["bytes"]
    assert said["cached"][0] >= said["bytes"] > said["cached"][1]
    assert said["same"]


def test_glibc_alone_removes_page_faults_of_the_main_thread() -> None:
    said = output_of(
        FORWARD
        + """
without, exact = forward_faults()
pool = memory_pool()
with pool, memory_pool():
    forward_faults()
    steady = steady_faults()
    result = forward_faults()[1]
    counted = pool.statistics()
    del exact
    freed = pool.statistics()
    trimmed = pool.trim()
after = forward_faults()[0]
print(json.dumps({
    "without": without, "steady": steady, "after": after, "backend": pool.backend, "trimmed": trimmed,
    "sum": result.sum().isfinite().item(), "live": counted.live_bytes, "freed": freed.live_bytes,
    "cached": counted.cached_bytes, "unknown": [counted.peak_bytes, counted.hits, counted.misses, counted.refused],
    "bytes": result.numel() * 4,
}))
""",
        preloaded=False,
    )
    assert said["backend"] == "glibc"
    assert said["without"] > 10_000
    assert said["after"] > 10_000
    assert said["steady"] < said["without"] / 100
    assert said["unknown"] == [None] * 4
    assert said["trimmed"] is None
    assert said["sum"]
    if said["live"] is not None:
        assert said["live"] >= 2 * said["bytes"]
        assert said["freed"] <= said["live"] - said["bytes"]
        assert said["cached"] >= said["bytes"]


# ---- Pools from Python ----------------------------------------------------------------------------------------------


def test_what_needs_the_library_says_how_to_get_it() -> None:
    for wrong in ({"max_bytes": 1 << 30}, {"preloaded": True}):
        with pytest.raises(RuntimeError, match=r"needs libxopt_pool.so .* start the process with LD_PRELOAD=/.*launch"):
            memory_pool(**wrong)


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="max_bytes is 0, expected a positive number"):
        memory_pool(0)
    with pytest.raises(ValueError, match="keep_bytes is -1"):
        memory_pool().trim(-1)
    with pytest.raises(RuntimeError, match="stopped more often than it was started"):
        memory_pool().stop()


def test_bounds_nesting_and_fork_with_torch(said_with_torch: Any) -> None:
    said = said_with_torch[1]
    assert said
    assert not [name for name, facts in said.items() if not all(facts)], said


# ---- The library ----------------------------------------------------------------------------------------------------


def test_the_library_needs_libc_alone() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("NOT RUN: there is no readelf")
    done = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True)
    needed = [line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line]
    assert [name for name in needed if not name.startswith(("libc.so", "libdl.so", "libpthread.so"))] == []
    assert needed


def test_programs_run_as_ever_under_the_library() -> None:
    for program in (["/bin/sh", "-c", "echo fine"], ["/bin/ls", "-d", "/"]):
        done = subprocess.run(program, capture_output=True, text=True, env={"LD_PRELOAD": str(LIBRARY)})
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
        large = malloc(65 * MB)
        fill(large, 65 * MB, 3)
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
            env={{"LD_PRELOAD": {str(LIBRARY)!r}}}, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits))
        print(done.stdout or done.stderr)
    """
    assert json.loads(fresh_process.output_of(limited)) == [True, -1]
