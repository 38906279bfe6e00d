"""Products whose k goes by slices, with tiles and weights that L2 does not hold: no family of cases reaches such sizes.

What a call comes to must not depend on how many threads share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.families import expect_equal
from xopt import _C

ops = torch.ops.xopt

# More and less than a chunk's row blocks, whole blocks and tiles of rows, and what ends within one.
ROWS = [33, 64, 96, 100, 197, 256, 300]
COLUMNS = 1608  # not whole panels, and with any K here more than half of an L2 cache
ALWAYS_SLICES = 1  # TunedStay::never


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, params=[False, True], ids=["as usual", "always"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """With slices that pay and, where caches are larger than here, those that do not."""
    if not request.param:
        yield
        return
    _C.force_tuning([-1, 0, 0, 0, ALWAYS_SLICES, 0])
    yield
    _C.leave_tuning()


def with_any_threads(compute: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(compute())
    torch.set_num_threads(before)
    for other in results[1:]:
        expect_equal("any number of threads", other, results[0])
    return results[0]


def expect_product(got: Tensor, x: Tensor, weight: Tensor) -> None:
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=1e-2 * float(exact.std()))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("depth", [1024, 1056, 1300, 2048], ids="k of {}".format)
def test_rows_and_depths(rows: int, depth: int) -> None:
    x, weight, bias = torch.randn(rows, depth).bfloat16(), torch.randn(COLUMNS, depth).bfloat16(), torch.randn(COLUMNS)
    packed = ops.linear_pack(weight, dtype=torch.bfloat16)
    expect_product(with_any_threads(lambda: ops.linear(x, packed, COLUMNS)), x, weight)
    floats = with_any_threads(lambda: ops.linear(x, packed, COLUMNS, bias, out_dtype=torch.float32))
    expect_product(floats - bias, x, weight)
    gelu = with_any_threads(lambda: ops.linear(x, packed, COLUMNS, bias, activation="gelu_erf"))
    expected = torch.nn.functional.gelu(floats.double())
    torch.testing.assert_close(gelu.double(), expected, rtol=2**-7, atol=1e-2 * float(floats.std()))


@pytest.mark.parametrize("rows", [128, 197])
def test_a_part_of_the_columns_that_begins_with_any_panel(rows: int) -> None:
    x, weight = torch.randn(rows, 2048).bfloat16(), torch.randn(COLUMNS, 2048).bfloat16()
    packed = ops.linear_pack(weight, dtype=torch.bfloat16)
    whole = ops.linear(x, packed, COLUMNS)
    for first, count in [(32, 1504), (96, COLUMNS - 96), (512, 1024)]:
        part = ops.linear(x, packed, count, first_column=first)
        expect_equal(f"{count} columns from {first} on", part, whole[:, first : first + count].contiguous())


@pytest.mark.parametrize("rows", [17, 32, 128, 130, 520])
@pytest.mark.parametrize("depth", [4096, 4160, 4224, 5600, 5632], ids="k of {}".format)
@pytest.mark.parametrize("gap", [0, 32], ids=["close together", "with gaps"])
def test_long_rows(rows: int, depth: int, gap: int) -> None:
    """Which are copied if all begin in one set of L1."""
    weight = torch.randn(640, depth).bfloat16()
    packed = ops.linear_pack(weight, dtype=torch.bfloat16)
    x = torch.randn(rows, depth + gap).bfloat16()[:, :depth]
    expect_product(with_any_threads(lambda: ops.linear(x, packed, 640, out_dtype=torch.float32)), x, weight)


def test_copies_of_more_rows_than_there_is_room_for_at_once() -> None:
    rows, depth, columns = 2200, 8192, 96
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(columns, depth).bfloat16()
    packed, residual = ops.linear_pack(weight, dtype=torch.bfloat16), torch.randn(rows, columns).bfloat16()
    sums = with_any_threads(lambda: ops.linear(x, packed, columns, binary="add", other=residual))
    expect_product(sums - residual, x, weight)


@pytest.mark.parametrize("rows", [96, 100, 197])
def test_rows_that_are_converted_on_their_way_in(rows: int) -> None:
    x, weight = torch.randn(rows, 1056), torch.randn(COLUMNS, 1056).bfloat16()
    packed = ops.linear_pack(weight, dtype=torch.bfloat16)
    expect_product(with_any_threads(lambda: ops.linear(x, packed, COLUMNS)), x.bfloat16(), weight)


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
def test_int8(rows: int, with_zero_points: bool, dtype: torch.dtype) -> None:
    depth = 1600
    x = torch.randint(0, 127, (rows, depth), dtype=dtype)
    weight = torch.randint(-128, 128, (COLUMNS, depth), dtype=torch.int8)
    scale, zero = torch.rand(COLUMNS) + 0.5, torch.randint(-9, 9, (COLUMNS,), dtype=torch.int32)
    packed = ops.linear_pack_int8(weight, scale, zero if with_zero_points else None)
    one, three = torch.ones(1), torch.tensor([3], dtype=torch.int32)
    got = with_any_threads(lambda: ops.qlinear(x, one, three, packed, COLUMNS, out_dtype=torch.float32))
    shifted = weight.double() - (zero.double()[:, None] if with_zero_points else 0)
    exact = (x.double() - 3) @ shifted.T * scale.double()
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("rows", [96, 128, 197])
def test_gates(rows: int) -> None:
    depth, inner = 1024, 1120
    x = torch.randn(rows, depth).bfloat16()
    gate, up = (torch.randn(inner, depth).bfloat16() / 32 for _ in range(2))
    gated = ops.linear_pack_gated(gate, up, dtype=torch.bfloat16)
    got = with_any_threads(lambda: ops.linear_gated(x, gated, inner))
    exact = torch.nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    torch.testing.assert_close(got.double(), exact, rtol=2**-6, atol=1e-2 * float(exact.std()))


@pytest.mark.parametrize("rows", [96, 197, 700])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "with a residual"])
def test_norms_of_sums(rows: int, adds: bool) -> None:
    """Whose rows wait for all of their columns, some groups of them after each other."""
    depth = 2048
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(COLUMNS, depth).bfloat16() / 32
    packed, residual = ops.linear_pack(weight, dtype=torch.bfloat16), torch.randn(rows, COLUMNS).bfloat16()
    scale, shift = torch.rand(COLUMNS), torch.randn(COLUMNS)
    given = residual if adds else None

    def norm() -> Tensor:
        out, _ = ops.linear_norm(x, packed, COLUMNS, None, given, norm_weight=scale, norm_bias=shift)
        return torch.as_tensor(out)

    sums = x.double() @ weight.double().T + (residual.double() if adds else 0)
    exact = torch.nn.functional.layer_norm(sums, (COLUMNS,), scale.double(), shift.double())
    torch.testing.assert_close(with_any_threads(norm).double(), exact, rtol=2**-6, atol=2e-2)
