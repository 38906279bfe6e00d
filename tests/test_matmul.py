"""xopt::matmul against the float64 reference: broadcast leading dimensions, strides, scale, addition, any threads."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch

from tests import cases, reference
from tests.cases import DTYPES
from tests.families import Family, expect_values, flushes_denormals

Tensor = torch.Tensor
ops = torch.ops.xopt

LAYOUTS = {"contiguous": 40, "offset": 10, "sliced": 15, "row_step": 10, "swapped": 10, "expanded": 8, "k_strided": 7}


@dataclass(frozen=True)
class MatmulCase:
    seed: int = 0
    dtype: str = "f32"
    m: int = 1
    n: int = 1
    k: int = 1
    left_lead: str = "-"
    right_lead: str = "-"
    left_values: str = "normal"
    right_values: str = "normal"
    left_layout: str = "contiguous"
    right_layout: str = "contiguous"
    left_turned: bool = False  # stands as [k, m] in memory
    right_turned: bool = False
    other: str = ""  # dtype, or empty: none
    other_shape: str = "2x3"
    other_layout: str = "contiguous"
    alpha: float = 1.0
    out: str = ""


def pick_broadcast(rng: random.Random, dims: tuple[int, ...]) -> str:
    """Some of the leading dimensions, from the last on, some of them as one."""
    kept = dims if rng.random() < 0.6 else dims[rng.randint(0, len(dims)) :]
    sizes = [1 if rng.random() < 0.2 else dim for dim in kept]
    return "x".join(map(str, sizes)) or "-"


def sample(rng: random.Random) -> MatmulCase:
    m, n, k = cases.pick_sizes(rng)
    dims = tuple(rng.choice((1, 2, 3, 5)) for _ in range(rng.randint(0, 3)))
    while math.prod((*dims, m, n, k)) > cases.WORK_LIMIT:
        dims = dims[1:]
    kinds = [cases.pick(rng, cases.VALUE_WEIGHTS) for _ in range(2)]
    if "integers" in kinds and rng.random() < 0.7:
        kinds = ["integers", "integers"]
    if {"tiny", "specials"} <= set(kinds):
        kinds[1] = "normal"  # infinity times what may be flushed to zero has no one answer
    other = rng.choice(("", *cases.FLOATS))
    shape = (*dims, m, n)
    return MatmulCase(
        seed=rng.randrange(1_000_000),
        dtype=rng.choice(cases.FLOATS),
        m=m,
        n=n,
        k=k,
        left_lead=pick_broadcast(rng, dims),
        right_lead=pick_broadcast(rng, dims) if rng.random() < 0.4 else "x".join(map(str, dims)) or "-",
        left_values=kinds[0],
        right_values=kinds[1],
        left_layout=cases.pick(rng, LAYOUTS),
        right_layout=cases.pick(rng, LAYOUTS),
        left_turned=rng.random() < 0.4,
        right_turned=rng.random() < 0.5,
        other=other,
        other_shape=(pick_broadcast(rng, shape) if rng.random() < 0.5 else "x".join(map(str, shape))) if other else "-",
        other_layout=cases.pick(rng, LAYOUTS) if other else "contiguous",
        alpha=rng.choice((1.0, 1.0, 0.125, -2.0, 0.3)),
        out=rng.choice(("", "", *cases.FLOATS)),
    )


def factor(
    values: str, lead: str, rows: int, columns: int, turned: bool, layout: str, dtype: str, generator: torch.Generator
) -> Tensor:
    shape = (*cases.lead_dims(lead), *((columns, rows) if turned else (rows, columns)))
    x = cases.tensor(values, shape, DTYPES[dtype], generator, layout)
    return x.mT if turned else x


def expected_product(case: MatmulCase, left: Tensor, right: Tensor, other: Tensor | None) -> reference.Estimate | None:
    """Of the rows of all pairs; None where there are none."""
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts = left.double().expand(*lead, case.m, case.k).reshape(math.prod(lead), case.m, case.k)
    rights = right.double().expand(*lead, case.k, case.n).reshape(math.prod(lead), case.k, case.n)
    flushes = flushes_denormals(DTYPES[case.dtype])
    pairs = [reference.matmul(a, b.T, flushes) for a, b in zip(lefts, rights, strict=True)]
    if not pairs or case.m == 0 or case.n == 0:
        return None
    parts = [torch.cat(each) for each in zip(*(vars(pair).values() for pair in pairs), strict=True)]
    estimate = reference.Estimate(*parts)
    if case.alpha != 1.0:
        estimate = reference.multiply(estimate, torch.tensor(reference.single(case.alpha), dtype=torch.float64))
    if other is not None:
        estimate = reference.add(estimate, other.double().expand(*lead, case.m, case.n).reshape(-1, case.n))
    return estimate


def check(case: MatmulCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    left = factor(
        *(case.left_values, case.left_lead, case.m, case.k, case.left_turned, case.left_layout, case.dtype), generator
    )
    right = factor(
        *(case.right_values, case.right_lead, case.k, case.n, case.right_turned, case.right_layout, case.dtype),
        generator,
    )
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    other = None
    if case.other:
        full = (*lead, case.m, case.n)
        sizes = cases.lead_dims(case.other_shape)[-len(full) :]
        sizes = tuple(
            size if size == 1 else most for size, most in zip(sizes, full[len(full) - len(sizes) :], strict=True)
        )
        kind = "integers" if case.left_values == case.right_values == "integers" else "normal"
        other = cases.tensor(kind, sizes, DTYPES[case.other], generator, case.other_layout)
    out_dtype = DTYPES[case.out] if case.out else None
    got = ops.matmul(left, right, other, alpha=case.alpha, out_dtype=out_dtype)
    expected = expected_product(case, left, right, other)
    dtype = DTYPES[case.out or case.dtype]
    shape = (*lead, case.m, case.n)
    if expected is None:
        assert got.shape == shape
        assert got.dtype == dtype
        return
    expect_values("the output", got, expected, shape, dtype, flushes_denormals(DTYPES[case.dtype]))


FAMILY = Family("matmul", MatmulCase, sample, check)


def test_cases(case_batch: list[MatmulCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
def test_tails() -> None:
    sizes = ((1, 1, 1), (5, 33, 17), (17, 15, 65), (16, 32, 64), (4, 97, 31), (33, 1, 40), (70, 40, 1), (37, 66, 1040))
    FAMILY.run_all(
        MatmulCase(
            *(m + n, dtype, m, n, k, "2x3", "3"),
            left_turned=left_turned,
            right_turned=right_turned,
            other="f32",
            alpha=0.5,
        )
        for dtype in cases.FLOATS
        for m, n, k in sizes
        for left_turned, right_turned in itertools.product((False, True), repeat=2)
    )


def test_factors_are_read_where_they_are() -> None:
    """Slices of a projection, and transposed matrices."""
    projected = torch.randn(2, 9, 3 * 4 * 16).view(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4)
    left, right = projected[0], projected[1]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results = [
            ops.matmul(left, right.mT),
            ops.matmul(left.mT, right),
            ops.matmul(left.mT, right.mT.contiguous().mT),
        ]
    names = [event.name for event in profile.events()]
    assert names.count("aten::copy_") == 1  # that of contiguous()
    assert torch.allclose(results[0], left @ right.mT, atol=1e-4)
    for result in results[1:]:
        assert torch.allclose(result, left.mT @ right, atol=1e-4)


@pytest.mark.sanitize  # where tiles are emulated: on their own machine few run this
@pytest.mark.parametrize("shape", [(3, 200, 70, 90), (1, 700, 300, 129), (50, 17, 16, 33)])
def test_threads_do_not_change_results(shape: tuple[int, int, int, int], torch_threads: None) -> None:
    pairs, m, n, k = shape
    for dtype in DTYPES.values():
        if not dtype.is_floating_point:
            continue
        left, right = torch.randn(pairs, m, k).to(dtype), torch.randn(pairs, n, k).to(dtype).mT
        results = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(ops.matmul(left, right, alpha=0.3))
        assert all(torch.equal(result, results[0]) for result in results)


def test_not_a_number_and_infinities_stay_in_their_rows_and_columns() -> None:
    left, right = torch.randn(2, 20, 35), torch.randn(2, 35, 40)
    left[0, 3, 5], right[1, 7, 9] = math.nan, math.inf
    expected = left @ right
    for dtype in (torch.float32, torch.bfloat16):
        got = ops.matmul(left.to(dtype), right.to(dtype))
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.isinf(), expected.isinf())


def test_errors_name_the_argument() -> None:
    x = torch.randn(2, 3, 4)
    for call, message in (
        (lambda: ops.matmul(x.double(), x), r"left: expected dtype .*, got float64"),
        (lambda: ops.matmul(x, x.half()), r"right: expected dtype float32, got float16"),
        (lambda: ops.matmul(x[0, 0], x), r"left: expected 2 to 16 dimensions, got 1"),
        (
            lambda: ops.matmul(x, x),
            r"right: expected as many rows as left has columns, .* \[2, 3, 4\], got \[2, 3, 4\]",
        ),
        (lambda: ops.matmul(x, torch.randn(3, 4, 5)), r"right: expected leading dimensions .* got \[3, 4, 5\]"),
        (lambda: ops.matmul(x, x.mT, torch.ones(3, 2)), r"other: expected .* broadcasts to \[2, 3, 3\], got \[3, 2\]"),
        (lambda: ops.matmul(x, x.mT, x.int()), r"other: expected dtype .*, got int32"),
        (lambda: ops.matmul(x, x.mT, alpha=math.inf), r"alpha: expected a finite number, got inf"),
        (lambda: ops.matmul(x, x.mT, out_dtype=torch.int8), r"out_dtype: expected one of .*, got int8"),
        (lambda: ops.matmul(x.requires_grad_(), x.mT), r"left: requires a gradient, but this op has none"),
    ):
        with pytest.raises(RuntimeError, match=f"xopt::matmul: {message}"):
            call()
