"""Threads: bitwise the same results for any number of them, calls from several at once, and use after a fork."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable

import pytest
import torch

import xopt  # noqa: F401 - loads the operators
from tests import fresh_process

COUNTS = (1, 2, 3, 5, 8)
# One row, few rows, several blocks of rows, few columns, many columns, a long sum.
SHAPES = ((1, 700, 512), (3, 100, 1000), (130, 257, 96), (600, 48, 65), (17, 1500, 40), (64, 33, 4100))

Tensor = torch.Tensor
Call = Callable[[], tuple[Tensor, ...]]


def calls(m: int, n: int, k: int) -> dict[str, Call]:
    """Every operator of the family in every dtype, on fixed tensors."""
    generator = torch.Generator().manual_seed(m + n + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ops = torch.ops.xopt
    x, weight, up, bias, other = random(m, k), random(n, k), random(n, k), random(n), random(m, n)
    made: dict[str, Call] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        packed, gated = ops.linear_pack(weight, dtype=dtype), ops.linear_pack_gated(weight, up, dtype=dtype)
        made[f"pack {dtype}"] = lambda dtype=dtype: (ops.linear_pack(weight, dtype=dtype),)
        made[f"linear {dtype}"] = lambda packed=packed: (
            ops.linear(x, packed, n, bias, activation="gelu_erf", binary="add", other=other),
        )
        made[f"linear_gated {dtype}"] = lambda gated=gated: (ops.linear_gated(x, gated, n, bias),)
        made[f"linear_norm {dtype}"] = lambda packed=packed: ops.linear_norm(
            x, packed, n, bias, other, norm="layer_norm", return_sum=True
        )
    s8 = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    packed8 = ops.linear_pack_int8(s8, torch.rand(n, generator=generator), torch.ones(1, dtype=torch.int32))
    scale, zero = torch.rand(m, generator=generator), torch.ones(m, dtype=torch.int32)
    for dtype in (torch.uint8, torch.int8):
        info = torch.iinfo(dtype)
        x8 = torch.randint(info.min, info.max + 1, (m, k), generator=generator, dtype=dtype)
        made[f"qlinear {dtype}"] = lambda x8=x8: (
            ops.qlinear(x8, scale, zero, packed8, n, bias, out_dtype=torch.float),
        )
    return made


def bits(tensors: tuple[Tensor, ...]) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_bitwise_equal_for_any_number_of_threads(shape: tuple[int, int, int], torch_threads: None) -> None:
    for name, call in calls(*shape).items():
        results = {}
        for count in COUNTS:
            torch.set_num_threads(count)
            results[count] = bits(call())
        differing = [count for count in COUNTS if results[count] != results[1]]
        assert not differing, f"{name} of {shape} differs between 1 and {differing} threads"


# Threads take pieces of these from each other: of rows, columns, rows that are normalized, images, lines.
UNEVEN = """
import os, torch, xopt
os.sched_setaffinity(0, {cpus})
from tests.test_threads import bits
ops = torch.ops.xopt

def results():
    torch.manual_seed(1)
    for m, n, k in ((900, 200, 300), (40, 2500, 600)):
        x, weight, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        for dtype in (torch.float32, torch.bfloat16):
            packed = ops.linear_pack(weight, dtype=dtype)
            yield f"linear {{m}} {{dtype}}", ops.linear(x, packed, n, bias)
    packed = ops.linear_pack(torch.randn(700, 64), dtype=torch.float32)
    yield "linear_norm", ops.linear_norm(torch.randn(2400, 64), packed, 700, norm="layer_norm")[0]
    yield "layer_norm", ops.layer_norm(torch.randn(300, 4000))[0]
    for groups, height in ((1, 40), (4, 40), (64, 400)):
        x = torch.randn(2, 64, height, 30).contiguous(memory_format=torch.channels_last)
        conv = torch.nn.Conv2d(64, 64, 3, padding=1, groups=groups).eval()
        yield f"conv {{groups}}", xopt.optimize(conv)(x)

with torch.inference_mode():
    torch.set_num_threads(1)
    alone = {{name: bits((value,)) for name, value in results()}}
    torch.set_num_threads(6)
    for _ in range(5):
        differing = [name for name, value in results() if bits((value,)) != alone[name]]
        assert not differing, differing
print("equal")
"""


@pytest.mark.sanitize
@pytest.mark.parametrize("granted", [6, 2])
def test_equal_where_threads_are_not_equally_fast_or_fewer(granted: int) -> None:
    """Six threads that share one CPU are seldom equally far; a team of two has parts of six to do."""
    program = UNEVEN.format(cpus={min(os.sched_getaffinity(0))})
    environment = {"OMP_THREAD_LIMIT": str(granted), "OMP_WAIT_POLICY": "passive"}
    assert fresh_process.output_of(program, **environment) == "equal"


@pytest.mark.sanitize
def test_equal_from_run_to_run() -> None:
    for name, call in calls(37, 200, 333).items():
        first = bits(call())
        assert all(bits(call()) == first for _ in range(10)), name


@pytest.mark.sanitize
def test_calls_from_several_python_threads() -> None:
    made = {(shape, name): call for shape in SHAPES[:4] for name, call in calls(*shape).items()}
    expected = {key: bits(call()) for key, call in made.items()}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            running = {key: pool.submit(lambda call=call: bits(call())) for key, call in made.items()}
            wrong = [key for key, future in running.items() if future.result() != expected[key]]
            assert not wrong, wrong


# Bytes are compared in Python: torch's own parallel operators do not survive a fork.
FORKING = """
import os, sys, torch, xopt
torch.set_num_threads({threads})
x, w = torch.randn(200, 300), torch.randn(250, 300)
packed = torch.ops.xopt.linear_pack(w, dtype=torch.bfloat16)
before = torch.ops.xopt.linear(x, packed, 250).numpy().tobytes()
packed_bytes = packed.numpy().tobytes()
child = os.fork()
if child == 0:
    same = torch.ops.xopt.linear(x, packed, 250).numpy().tobytes() == before
    repacked = torch.ops.xopt.linear_pack(w, dtype=torch.bfloat16).numpy().tobytes() == packed_bytes
    os._exit(0 if same and repacked else 3)
_, status = os.waitpid(child, 0)
after = torch.ops.xopt.linear(x, packed, 250).numpy().tobytes()
print("child", os.waitstatus_to_exitcode(status), "parent", after == before)
"""


@pytest.mark.sanitize
@pytest.mark.parametrize("threads", [1, 4])
def test_fork_after_use(threads: int) -> None:
    program = FORKING.format(threads=threads)
    done = fresh_process.run("-c", program)
    assert done.stdout.split() == ["child", "0", "parent", "True"], done.stdout + done.stderr[-4000:]
