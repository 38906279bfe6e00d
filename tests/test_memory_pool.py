"""The memory pool: page faults vanish, what it counts is right, bounds hold, and tensors outlive it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import fresh_process
from tests.test_sanitizer import sanitizer_is_loaded
from xopt.runtime import POOL_LIBRARY, memory_pool

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
    environment = {"LD_PRELOAD": str(POOL_LIBRARY)} if preloaded else {}
    return json.loads(fresh_process.output_of_cold(program, **environment))


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
