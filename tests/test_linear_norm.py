"""xopt::linear_norm, a linear with a residual and a LayerNorm or RMSNorm of its rows, against the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tests import cases, reference
from tests.cases import DTYPES
from tests.families import Family, expect_values, flushes_denormals
from tests.test_linear import OTHER_LAYOUTS, sample_input

Tensor = torch.Tensor


@dataclass(frozen=True)
class LinearNormCase:
    seed: int = 0
    lead: str = "1"
    n: int = 1
    k: int = 1
    packed: str = "f32"
    input: str = "f32"
    weight: str = "f32"
    out: str = ""
    input_values: str = "normal"
    weight_values: str = "normal"
    other_values: str = "normal"
    input_layout: str = "contiguous"
    weight_layout: str = "contiguous"
    bias: str = ""
    bias_layout: str = "contiguous"
    residual: str = ""
    residual_layout: str = "contiguous"
    residual_offset: float = 0.0  # added to the residual: a mean far from 0, which a one-pass variance does not survive
    norm: str = "layer_norm"
    norm_weight: str = ""
    norm_bias: str = ""
    eps: float = 1e-5
    return_sum: bool = False


def sample(rng: random.Random) -> LinearNormCase:
    fields = sample_input(rng)
    fields["out"] = rng.choice(("", "", "f32", "bf16", "f16"))
    for name, chance in (("bias", 0.6), ("residual", 0.7), ("norm_weight", 0.7), ("norm_bias", 0.5)):
        if rng.random() < chance:
            fields[name] = rng.choice(cases.FLOATS)
    fields["bias_layout"] = cases.pick(rng, cases.VECTOR_LAYOUTS)
    fields["residual_layout"] = cases.pick(rng, OTHER_LAYOUTS)
    fields["residual_offset"] = rng.choice((0.0, 0.0, 0.0, 3.0, 100.0))
    fields["norm"] = rng.choice(("layer_norm", "rms_norm"))
    fields["eps"] = rng.choice((1e-5, 1e-6, 1e-12, 0.1))
    fields["return_sum"] = rng.random() < 0.5
    return LinearNormCase(**fields)  # type: ignore[arg-type]


def check(case: LinearNormCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    lead, compute = cases.lead_dims(case.lead), DTYPES[case.packed]
    x = cases.tensor(case.input_values, (*lead, case.k), DTYPES[case.input], generator, case.input_layout)
    weight = cases.tensor(case.weight_values, (case.n, case.k), DTYPES[case.weight], generator, case.weight_layout)

    def vector(dtype: str) -> Tensor | None:
        if not dtype:
            return None
        return cases.tensor(case.other_values, (case.n,), DTYPES[dtype], generator, case.bias_layout)

    bias, norm_weight, norm_bias = vector(case.bias), vector(case.norm_weight), vector(case.norm_bias)
    residual = None
    if case.residual:
        plain = cases.values(case.other_values, (*lead, case.n), DTYPES[case.residual], generator)
        residual = cases.laid_out(plain + case.residual_offset, case.residual_layout)
    out, total = torch.ops.xopt.linear_norm(
        x,
        torch.ops.xopt.linear_pack(weight, dtype=compute),
        case.n,
        bias,
        residual,
        norm=case.norm,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        eps=case.eps,
        out_dtype=DTYPES[case.out] if case.out else None,
        return_sum=case.return_sum,
    )
    rows = x.reshape(cases.row_count(case.lead), case.k).to(compute).double()
    flushes = flushes_denormals(compute)
    summed = reference.add_bias(reference.matmul(rows, weight.to(compute).double(), flushes), bias)
    if residual is not None:
        summed = reference.add(summed, residual.reshape(summed.value.shape).double())
    shape, dtype = (*lead, case.n), DTYPES[case.out or case.input]
    if case.return_sum:
        expect_values("the sum", total, summed, shape, dtype, flushes)
    elif total.numel() != 0:
        raise AssertionError(f"the sum was not asked for and is {tuple(total.shape)}")
    normed = reference.row_norm(summed, case.norm, norm_weight, norm_bias, case.eps)
    expect_values("the output", out, normed, shape, dtype, flushes)


FAMILY = Family("linear_norm", LinearNormCase, sample, check)


def test_cases(case_batch: list[LinearNormCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_tails(norm: str) -> None:
    FAMILY.run_all(
        LinearNormCase(
            seed=m * 10_000 + n * 100 + k,
            lead=str(m),
            n=n,
            k=k,
            packed=packed,
            input=packed,
            weight=packed,
            out="f32",
            residual="f32",
            bias="f32",
            norm=norm,
            norm_weight="f32",
            return_sum=True,
        )
        for packed in cases.FLOATS
        for m in (1, 3, 5, 16, 17, 33)
        for n in (1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 129)
        for k in (1, 17, 33, 65)
    )


def test_wide_rows() -> None:
    """Rows of many panels, whose norm has to wait for the last of them."""
    FAMILY.run_all(
        LinearNormCase(
            seed=n, lead=str(m), n=n, k=40, packed=packed, input=packed, weight=packed, residual="f32", norm=norm
        )
        for packed in cases.FLOATS
        for norm in ("layer_norm", "rms_norm")
        for m in (1, 7, 50, 130)
        for n in (768, 1000, 1025, 4097)
    )


@pytest.mark.parametrize("packed", cases.FLOATS)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("lead", "n", "k"), [("0", 5, 7), ("3", 0, 7), ("3", 5, 0), ("2x0x3", 4, 4)])
def test_zero_sizes(packed: str, norm: str, lead: str, n: int, k: int) -> None:
    FAMILY.run_all(
        LinearNormCase(
            lead=lead,
            n=n,
            k=k,
            packed=packed,
            input=packed,
            weight=packed,
            norm=norm,
            residual=residual,
            return_sum=True,
        )
        for residual in ("", "f32")
    )
