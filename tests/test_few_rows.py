"""Products of a few blocks of rows with weights that L2 does not hold, which go one of two ways with tiles.

No family of cases reaches such sizes. What rows come to must not depend on the way: many rows, of which these are the
first ones, go a third one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import expect_equal
from xopt import _C

ops = torch.ops.xopt

MANY = 300  # rows, more than few
FEW = [65, 96, 100, 128, 197, 224]
NEVER, ALWAYS = 1, 2  # TunedStay
COLUMNS = 1608  # not whole panels, and with any K here more than half of an L2 cache


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 5], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, params=[NEVER, ALWAYS], ids=["rows stay", "rows pass"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    _C.force_tuning([-1, 0, 0, 0, request.param, 0])
    yield
    _C.leave_tuning()


def expect_product(got: Tensor, x: Tensor, weight: Tensor) -> None:
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=1e-2 * float(exact.std()))


@pytest.mark.parametrize("rows", FEW)
@pytest.mark.parametrize("depth", [1024, 1056, 1300], ids=["rows that meet", "uneven blocks", "a part of a tile"])
def test_rows_come_to_what_they_do_among_many(rows: int, depth: int, threads: int) -> None:
    x, weight = torch.randn(MANY, depth).bfloat16(), torch.randn(COLUMNS, depth).bfloat16()
    packed, bias = ops.linear_pack(weight, dtype=torch.bfloat16), torch.randn(COLUMNS)
    for options in ({}, {"bias": bias, "activation": "gelu_erf"}, {"out_dtype": torch.float32}):
        many = ops.linear(x, packed, COLUMNS, **options)
        expect_equal(f"{options}", ops.linear(x[:rows], packed, COLUMNS, **options), many[:rows].contiguous())
    expect_product(ops.linear(x[:rows], packed, COLUMNS), x[:rows], weight)


@pytest.mark.parametrize("rows", [128, 197])
def test_a_part_of_the_columns_that_begins_with_any_panel(rows: int, threads: int) -> None:
    x, weight = torch.randn(rows, 2048).bfloat16(), torch.randn(COLUMNS, 2048).bfloat16()
    packed = ops.linear_pack(weight, dtype=torch.bfloat16)
    whole = ops.linear(x, packed, COLUMNS)
    for first, count in [(32, 1504), (96, COLUMNS - 96), (512, 1024)]:
        part = ops.linear(x, packed, count, first_column=first)
        expect_equal(f"{count} columns from {first} on", part, whole[:, first : first + count].contiguous())


@pytest.mark.parametrize("rows", [128, 130])
@pytest.mark.parametrize("depth", [4096, 4160, 4224, 5600, 5632], ids="k of {}".format)
@pytest.mark.parametrize("gap", [0, 32], ids=["close together", "with gaps"])
def test_long_rows(rows: int, depth: int, gap: int, threads: int) -> None:
    """Of which a copy holds all of k, or does not."""
    weight = torch.randn(640, depth).bfloat16()
    packed = ops.linear_pack(weight, dtype=torch.bfloat16)
    x = torch.randn(MANY, depth + gap).bfloat16()[:, :depth]
    many = ops.linear(x, packed, 640, out_dtype=torch.float32)
    few = ops.linear(x[:rows], packed, 640, out_dtype=torch.float32)
    expect_equal("the sums", few, many[:rows].contiguous())
    expect_product(few, x[:rows], weight)


@pytest.mark.parametrize("rows", [96, 100, 197])
def test_rows_that_are_converted_on_their_way_in(rows: int, threads: int) -> None:
    x, weight = torch.randn(MANY, 1056), torch.randn(COLUMNS, 1056).bfloat16()
    packed = ops.linear_pack(weight, dtype=torch.bfloat16)
    many = ops.linear(x, packed, COLUMNS)
    expect_equal("floats", ops.linear(x[:rows], packed, COLUMNS), many[:rows].contiguous())
    expect_product(ops.linear(x[:rows], packed, COLUMNS), x[:rows].bfloat16(), weight)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["in place", "copied"])
def test_as_few_products_as_sanitizers_have_time_for(dtype: torch.dtype) -> None:
    columns, depth = 1090, 1024
    x, weight = torch.randn(70, depth).to(dtype), torch.randn(columns, depth).bfloat16()
    got = ops.linear(x, ops.linear_pack(weight, dtype=torch.bfloat16), columns)
    expect_product(got, x.bfloat16(), weight)


@pytest.mark.parametrize("rows", [96, 100, 224])
@pytest.mark.parametrize("with_zero_points", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_int8(rows: int, with_zero_points: bool, dtype: torch.dtype, threads: int) -> None:
    depth = 1600
    x = torch.randint(0, 127, (rows, depth), dtype=dtype)
    weight = torch.randint(-128, 128, (COLUMNS, depth), dtype=torch.int8)
    scale, zero = torch.rand(COLUMNS) + 0.5, torch.randint(-9, 9, (COLUMNS,), dtype=torch.int32)
    packed = ops.linear_pack_int8(weight, scale, zero if with_zero_points else None)
    got = ops.qlinear(x, torch.ones(1), torch.tensor([3], dtype=torch.int32), packed, COLUMNS, out_dtype=torch.float32)
    shifted = weight.double() - (zero.double()[:, None] if with_zero_points else 0)
    exact = (x.double() - 3) @ shifted.T * scale.double()
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("rows", [96, 128, 197])
def test_gates_norms_and_residuals(rows: int, threads: int) -> None:
    depth, inner = 1024, 1120
    x = torch.randn(MANY, depth).bfloat16()
    gate, up = (torch.randn(inner, depth).bfloat16() / 32 for _ in range(2))
    gated = ops.linear_pack_gated(gate, up, dtype=torch.bfloat16)
    many = ops.linear_gated(x, gated, inner)
    expect_equal("gated", ops.linear_gated(x[:rows], gated, inner), many[:rows].contiguous())

    packed = ops.linear_pack(torch.randn(COLUMNS, depth).bfloat16() / 32, dtype=torch.bfloat16)
    residual = torch.randn(MANY, COLUMNS).bfloat16()
    options: dict[str, Any] = {"norm_weight": torch.rand(COLUMNS), "norm_bias": torch.randn(COLUMNS)}
    for given in (residual, None):
        whole, _ = ops.linear_norm(x, packed, COLUMNS, None, given, **options)
        part, _ = ops.linear_norm(x[:rows], packed, COLUMNS, None, None if given is None else given[:rows], **options)
        expect_equal("the norm", part, whole[:rows].contiguous())
    sums = ops.linear(x, packed, COLUMNS, binary="add", other=residual)
    few = ops.linear(x[:rows], packed, COLUMNS, binary="add", other=residual[:rows])
    expect_equal("the sum", few, sums[:rows].contiguous())


@pytest.mark.parametrize("faster", [0, 1])
def test_calls_take_turns_in_stretches_and_then_go_the_faster_way(faster: int) -> None:
    calls = 1000
    ways = _C.testing.ways_of_waits((3e-4, 1e-5) if faster == 1 else (1e-5, 3e-4), calls)
    changes = sum(a != b for a, b in itertools.pairwise(ways))
    assert 8 < changes < calls / 32
    assert ways[-1] == faster
    assert len(set(ways[-64:])) == 1
