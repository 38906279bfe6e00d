"""The memory of large outputs, which is kept for the next ones."""

from __future__ import annotations

import copy
import io
import os
import resource
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import xopt
from xopt import _C

MB = 1 << 20


class Statistics(NamedTuple):
    live: int
    kept: int
    allocations: int
    fresh: int

    @classmethod
    def now(cls) -> Statistics:
        return cls(*_C.output_statistics())


@pytest.fixture(autouse=True)
def usual_limit() -> Iterator[None]:
    xopt.runtime.keep_outputs(256 * MB)
    yield
    xopt.runtime.keep_outputs(xopt.config.current.kept_output_mb * MB)


PACKED: list[Tensor] = []


@pytest.fixture(autouse=True, scope="module")
def packed_weight() -> Iterator[None]:
    """Not for longer than these tests: others look at the memory of all weights."""
    PACKED.append(torch.ops.xopt.linear_pack(torch.eye(1024), dtype=torch.float32))
    yield
    PACKED.clear()


def doubled(rows: int, value: float = 1.0) -> Tensor:
    """An output of `rows` times 4 KB."""
    x = torch.full((1, 1024), value).expand(rows, -1)
    return torch.ops.xopt.linear(x, PACKED[0], 1024)  # type: ignore[no-any-return]


def test_memory_is_used_again() -> None:
    xopt.runtime.keep_outputs(256 * MB)
    for _ in range(2):
        doubled(8192)
    before, faults = Statistics.now(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        assert doubled(8192, 3.0)[-1, -1] == 3.0
    after = Statistics.now()
    assert after.allocations == before.allocations + 5
    assert after.fresh == before.fresh
    assert after.live == before.live
    assert after.kept >= 32 * MB
    # 32 MB are 8192 pages; what Python and the sums of the reference need is far below one output's.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 4096


def test_tensors_keep_their_memory() -> None:
    held = [doubled(1024, float(value)) for value in range(20)]
    xopt.runtime.keep_outputs(0)
    assert [float(each.mean()) for each in held] == list(range(20))
    view = held[3][5:7]
    held.clear()
    assert float(view.mean()) == 3.0
    assert Statistics.now().live >= 4 * MB


def test_no_more_than_the_limit_is_kept() -> None:
    xopt.runtime.keep_outputs(16 * MB)
    held = [doubled(4096) for _ in range(8)]
    held.clear()
    assert Statistics.now().kept <= 16 * MB
    xopt.runtime.keep_outputs(0)
    assert Statistics.now().kept == 0
    before = Statistics.now()
    doubled(4096)
    assert Statistics.now() == before


def test_small_outputs_are_torchs() -> None:
    before = Statistics.now()
    doubled(100)
    assert Statistics.now() == before


def test_several_threads() -> None:
    wrong: list[Tensor] = []

    def work(value: float) -> None:
        for _ in range(20):
            results = [doubled(512, value) for _ in range(3)]
            wrong.extend(each for each in results if not bool((each == value).all()))

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fork() -> None:
    held = doubled(1024, 2.0)
    child = os.fork()
    if child == 0:
        os._exit(0 if float(doubled(1024, 5.0)[-1, -1]) == 5.0 and float(held[-1, -1]) == 2.0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_torch_does_with_tensors() -> None:
    out = doubled(1024, 2.0)
    assert torch.equal(copy.deepcopy(out), out)
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    assert torch.equal(torch.load(file), out)
    assert float(out.numpy().mean()) == 2.0
    assert out.data_ptr() % 64 == 0
    out.add_(1)
    out.resize_(10, 10)
    assert float(out.mean()) == 3.0
    assert out.share_memory_().is_shared()


def test_bad_limits() -> None:
    with pytest.raises(ValueError, match=r"keep_outputs: max_bytes: expected a number of bytes, got -1"):
        xopt.runtime.keep_outputs(-1)
    with pytest.raises(ValueError, match=r"XOPT_KEPT_OUTPUT_MB: expected a number of megabytes, got 'many'"):
        xopt.config.Environment.read({"XOPT_KEPT_OUTPUT_MB": "many"})
    assert xopt.config.Environment.read({"XOPT_KEPT_OUTPUT_MB": "7"}).kept_output_mb == 7
