"""xopt::softmax against the float64 reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tests import cases, reference
from tests.cases import DTYPES
from tests.families import Family, expect_values

ops = torch.ops.xopt


@dataclass(frozen=True)
class SoftmaxCase:
    seed: int = 0
    lead: str = "1"
    n: int = 1
    input: str = "f32"
    out: str = ""
    values: str = "normal"
    layout: str = "contiguous"
    factor: float = 1.0  # how far apart the values are


def sample(rng: random.Random) -> SoftmaxCase:
    return SoftmaxCase(
        seed=rng.randrange(1_000_000),
        lead=cases.pick_lead(rng, cases.pick_size(rng)),
        n=rng.choice((cases.pick_size(rng), rng.choice(cases.LARGE))),
        input=rng.choice(cases.FLOATS),
        out=rng.choice(("", "", *cases.FLOATS)),
        values=rng.choice(("normal", "normal", "integers", "zeros", "specials", "huge", "one_hot")),
        layout=cases.pick(rng, cases.INPUT_LAYOUTS),
        factor=rng.choice((0.1, 1.0, 1.0, 30.0)),
    )


def check(case: SoftmaxCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    shape, dtype = (*cases.lead_dims(case.lead), case.n), DTYPES[case.input]
    x = (cases.values(case.values, shape, torch.float32, generator) * case.factor).to(dtype)
    x = cases.laid_out(x, case.layout)
    got = ops.softmax(x, out_dtype=DTYPES[case.out] if case.out else None)
    rows = x.double().reshape(-1, case.n) if case.n else x.double()
    expect_values("the output", got, reference.softmax(rows), shape, DTYPES[case.out or case.input])


FAMILY = Family("softmax", SoftmaxCase, sample, check)


def test_cases(case_batch: list[SoftmaxCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
def test_tails() -> None:
    FAMILY.run_all(
        SoftmaxCase(seed=n, lead="3", n=n, input=dtype) for dtype in cases.FLOATS for n in (*cases.EDGES, 768, 2051)
    )


def test_rows_are_as_in_torch_where_nothing_is_finite() -> None:
    infinity, nan = float("inf"), float("nan")
    for n in (1, 5, 40):
        for first in (infinity, -infinity, nan):
            for rest in (0.0, -infinity):
                x = torch.full((2, n), rest)
                x[0, 0] = first
                expected = torch.softmax(x, -1)
                assert torch.allclose(ops.softmax(x), expected, equal_nan=True), (n, first, rest)


def test_threads_do_not_change_results(torch_threads: None) -> None:
    x = torch.randn(300, 770)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(ops.softmax(x))
    assert all(torch.equal(result, results[0]) for result in results)


def test_errors_name_the_argument() -> None:
    with pytest.raises(RuntimeError, match=r"softmax: input: expected dtype .*, got int64"):
        ops.softmax(torch.ones(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"softmax: input: expected 1 to .* dimensions, got 0"):
        ops.softmax(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match=r"softmax: out_dtype: expected one of .*, got int8"):
        ops.softmax(torch.ones(3), out_dtype=torch.int8)
