"""xopt::layer_norm, rms_norm and unit_norm against the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests import cases, reference
from tests.cases import DTYPES
from tests.families import Family, expect_values
from tests.test_linear import OTHER_LAYOUTS

Tensor = torch.Tensor


@dataclass(frozen=True)
class NormCase:
    seed: int = 0
    lead: str = "1"
    n: int = 1
    input: str = "f32"
    out: str = ""
    values: str = "normal"
    layout: str = "contiguous"
    offset: float = 0.0  # added to the input: a mean far from 0, which a one-pass variance does not survive
    residual: str = ""
    residual_layout: str = "contiguous"
    norm: str = "layer_norm"
    weight: str = ""
    bias: str = ""
    weight_offset: float = 0.0
    eps: float = 1e-5
    return_sum: bool = False


def sample(rng: random.Random) -> NormCase:
    norm = rng.choice(("layer_norm", "layer_norm", "rms_norm", "rms_norm", "unit_norm"))
    has_more = norm != "unit_norm"
    return NormCase(
        seed=rng.randrange(2**31),
        lead=cases.pick_lead(rng, cases.pick_size(rng)),
        n=rng.choice((cases.pick_size(rng), rng.choice(cases.LARGE))),
        input=rng.choice(cases.FLOATS),
        out=rng.choice(("", "", *cases.FLOATS)),
        layout=cases.pick(rng, OTHER_LAYOUTS),
        offset=rng.choice((0.0, 0.0, 3.0, 100.0)),
        residual=rng.choice(("", *cases.FLOATS)) if has_more else "",
        residual_layout=cases.pick(rng, OTHER_LAYOUTS),
        norm=norm,
        weight=rng.choice(("", *cases.FLOATS)) if has_more else "",
        bias=rng.choice(("", *cases.FLOATS)) if norm == "layer_norm" else "",
        weight_offset=rng.choice((0.0, 1.0)) if norm == "rms_norm" else 0.0,
        eps=rng.choice((1e-5, 1e-6, 1e-12, 0.1)),
        return_sum=has_more and rng.random() < 0.5,
    )


def check(case: NormCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (*cases.lead_dims(case.lead), case.n)

    def laid_out(dtype: str, layout: str, offset: float = 0.0) -> Tensor:
        return cases.laid_out(cases.values(case.values, shape, DTYPES[dtype], generator) + offset, layout)

    def vector(dtype: str) -> Tensor | None:
        return cases.values(case.values, (case.n,), DTYPES[dtype], generator) if dtype else None

    x = laid_out(case.input, case.layout, case.offset)
    residual = laid_out(case.residual, case.residual_layout) if case.residual else None
    weight, bias = vector(case.weight), vector(case.bias)
    options: dict[str, Any] = {"eps": case.eps, "out_dtype": DTYPES[case.out] if case.out else None}
    if case.norm != "unit_norm":
        options |= {"residual": residual, "return_sum": case.return_sum}
    if case.norm == "unit_norm":
        out, total = torch.ops.xopt.unit_norm(x, **options), torch.empty(0)
    elif case.norm == "layer_norm":
        out, total = torch.ops.xopt.layer_norm(x, weight, bias, **options)
    else:
        out, total = torch.ops.xopt.rms_norm(x, weight, weight_offset=case.weight_offset, **options)

    rows = x.reshape(-1, case.n).double() if case.n else x.double()
    nothing = torch.zeros_like(rows, dtype=torch.bool)
    summed = reference.Estimate(rows, torch.zeros_like(rows), nothing, nothing)
    if residual is not None:
        summed = reference.add(summed, residual.reshape(rows.shape).double())
    if case.return_sum:
        expect_values("the sum", total, summed, shape, DTYPES[case.input], False)
    elif total.numel() != 0:
        raise AssertionError(f"the sum was not asked for and is {tuple(total.shape)}")
    shifted = weight if weight is None or not case.weight_offset else weight.float() + case.weight_offset
    normed = reference.row_norm(summed, case.norm, shifted, bias, case.eps)
    expect_values("the output", out, normed, shape, DTYPES[case.out or case.input], False)


FAMILY = Family("norm", NormCase, sample, check)


def test_cases(case_batch: list[NormCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "unit_norm"])
def test_tails(norm: str) -> None:
    more: dict[str, Any] = {} if norm == "unit_norm" else {"weight": "f32", "return_sum": True}
    FAMILY.run_all(
        NormCase(seed=n, lead="3", n=n, input=dtype, residual=dtype if more else "", norm=norm, **more)
        for dtype in cases.FLOATS
        for n in (*cases.EDGES, 768, 2051)
    )


@pytest.mark.parametrize("distance", [1e2, 1e3, 1e4])
def test_mean_far_from_zero(distance: float) -> None:
    """The variance of what lies around a mean a thousand deviations away, where one pass in fp32 finds none."""
    x = torch.randn(7, 2051, generator=torch.Generator().manual_seed(1)) + distance
    out, _ = torch.ops.xopt.layer_norm(x)
    expected = torch.nn.functional.layer_norm(x.double(), (2051,))
    assert (out - expected).abs().max() < 4 * distance * reference.U32


def test_residual_is_not_rounded_before_the_norm() -> None:
    x = torch.full((2, 64), 256.0).bfloat16()
    residual = torch.arange(64.0).mul(2.0**-8).repeat(2, 1)  # below a bf16 step of x
    out, total = torch.ops.xopt.layer_norm(x, residual=residual, return_sum=True, out_dtype=torch.float32)
    expected = torch.nn.functional.layer_norm(x.double() + residual, (64,))
    assert torch.allclose(out.double(), expected, atol=1e-3)
    assert torch.equal(total, x)


def test_threads_do_not_change_results() -> None:
    x = torch.randn(301, 770)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(torch.ops.xopt.layer_norm(x)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)
