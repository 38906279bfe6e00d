"""xopt::qlinear and the packing of int8 weights: the integer sum is exact, so only the scales round."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tests import cases, reference
from tests.cases import DTYPES
from tests.families import Family, expect_equal, expect_values
from tests.test_linear import UNPACK_LIMIT, WEIGHT_LAYOUTS, sample_extras, sample_output

Tensor = torch.Tensor


@dataclass(frozen=True)
class QLinearCase:
    seed: int = 0
    lead: str = "1"
    n: int = 1
    k: int = 1
    input: str = "u8"
    out: str = "f32"
    input_values: str = "normal"
    weight_values: str = "normal"
    other_values: str = "normal"
    input_layout: str = "contiguous"
    weight_layout: str = "contiguous"
    scales: str = "plain"  # or `powers`: powers of two, which make everything exact
    input_scale_rows: bool = False  # one a row instead of one for all
    input_zero_point: str = "none"  # or `all`, `rows`
    weight_scale_rows: bool = True
    weight_zero_point: str = "none"
    bias: str = ""
    bias_layout: str = "contiguous"
    activation: str = "none"
    alpha: float = 0.0
    beta: float = 0.0
    binary: str = "none"
    other: str = "f32"
    other_row: bool = False
    other_layout: str = "contiguous"
    activation_last: bool = False
    output_scale: float = 1.0
    output_zero_point: int = 0


def sample(rng: random.Random) -> QLinearCase:
    m, n, k = cases.pick_sizes(rng)
    fields = {**sample_output(rng), **sample_extras(rng)}
    fields["out"] = fields["out"] or "f32"
    powers = rng.random() < 0.4
    if fields["out"] in ("s8", "u8") and powers:
        fields["output_scale"] = rng.choice((0.5, 1.0, 4.0, 16.0))
    return QLinearCase(
        seed=rng.randrange(1_000_000),
        lead=cases.pick_lead(rng, m),
        n=n,
        k=k,
        input=rng.choice(("u8", "s8")),
        input_values=cases.pick(rng, cases.INT8_VALUE_WEIGHTS),
        weight_values=cases.pick(rng, cases.INT8_VALUE_WEIGHTS),
        other_values="integers" if powers else "normal",
        input_layout=cases.pick(rng, cases.INPUT_LAYOUTS),
        weight_layout=cases.pick(rng, WEIGHT_LAYOUTS),
        scales="powers" if powers else "plain",
        input_scale_rows=rng.random() < 0.4,
        input_zero_point=rng.choice(("none", "all", "rows")),
        weight_scale_rows=rng.random() < 0.7,
        weight_zero_point=rng.choice(("none", "none", "all", "rows")),
        **fields,  # type: ignore[arg-type]
    )


def scale_values(kind: str, count: int, generator: torch.Generator) -> Tensor:
    if kind == "powers":
        return torch.exp2(torch.randint(-4, 2, (count,), generator=generator).float())
    return torch.rand(count, generator=generator) * 0.05 + 0.001


def zero_points(kind: str, dtype: torch.dtype, count: int, generator: torch.Generator) -> Tensor | None:
    if kind == "none":
        return None
    info = torch.iinfo(dtype)
    shape = (count if kind == "rows" else 1,)
    return torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=torch.int32)


def check(case: QLinearCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    lead, rows, dtype = cases.lead_dims(case.lead), cases.row_count(case.lead), DTYPES[case.input]
    x = cases.tensor(case.input_values, (*lead, case.k), dtype, generator, case.input_layout)
    weight = cases.tensor(case.weight_values, (case.n, case.k), torch.int8, generator, case.weight_layout)
    input_scale = scale_values(case.scales, rows if case.input_scale_rows else 1, generator)
    weight_scale = scale_values(case.scales, case.n if case.weight_scale_rows else 1, generator)
    input_zero = zero_points(case.input_zero_point, dtype, rows, generator)
    weight_zero = zero_points(case.weight_zero_point, torch.int8, case.n, generator)
    bias = other = None
    if case.bias:
        bias = cases.tensor(case.other_values, (case.n,), DTYPES[case.bias], generator, case.bias_layout)
    if case.binary != "none":
        shape = (case.n,) if case.other_row else (*lead, case.n)
        other = cases.tensor(case.other_values, shape, DTYPES[case.other], generator, case.other_layout)

    packed = torch.ops.xopt.linear_pack_int8(weight, weight_scale, weight_zero)
    if weight.numel() <= UNPACK_LIMIT:
        unpacked, scale, zero = torch.ops.xopt.linear_unpack_int8(packed, case.n, case.k)
        expect_equal("the unpacked weight", unpacked, weight.contiguous())
        expect_equal("the unpacked scale", scale, weight_scale.expand(case.n))
        no_zero = torch.zeros(case.n, dtype=torch.int32)
        expect_equal("the unpacked zero point", zero, no_zero if weight_zero is None else weight_zero.expand(case.n))
    got = torch.ops.xopt.qlinear(
        x,
        input_scale,
        input_zero,
        packed,
        case.n,
        bias,
        activation=case.activation,
        alpha=case.alpha,
        beta=case.beta,
        binary=case.binary,
        other=other,
        activation_last=case.activation_last,
        out_dtype=DTYPES[case.out],
        output_scale=case.output_scale,
        output_zero_point=case.output_zero_point,
    )
    product = reference.int8_matmul(x.reshape(rows, case.k), input_zero, input_scale, weight, weight_zero, weight_scale)
    if other is not None and not case.other_row:
        other = other.reshape(product.value.shape)
    expected = reference.epilogue(case, product, bias, other)
    scale_and_zero = (case.output_scale, case.output_zero_point)
    expect_values("the output", got, expected, (*lead, case.n), DTYPES[case.out], False, *scale_and_zero)


FAMILY = Family("qlinear", QLinearCase, sample, check)


def test_cases(case_batch: list[QLinearCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["u8", "s8"])
def test_tails(dtype: str) -> None:
    """Every size around a tile, with the values that overflow 16 bits, compared exactly."""
    FAMILY.run_all(
        QLinearCase(
            seed=m * 10_000 + n * 100 + k,
            lead=str(m),
            n=n,
            k=k,
            input=dtype,
            input_values="extremes",
            weight_values="extremes" if k % 2 else "normal",
            scales="powers",
            input_zero_point="rows",
        )
        for m in (1, 2, 3, 4, 5, 16, 17, 33)
        for n in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65)
        for k in (1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 129)
    )


@pytest.mark.parametrize("dtype", ["u8", "s8"])
def test_long_sums(dtype: str) -> None:
    """Sums over several blocks along K, with zero points on both sides, which need sums of rows and columns."""
    FAMILY.run_all(
        QLinearCase(
            seed=m * 10_000 + k,
            lead=str(m),
            n=n,
            k=k,
            input=dtype,
            scales="powers",
            input_zero_point=zero_point,
            weight_zero_point=zero_point,
        )
        for m in (1, 4, 5, 17, 40)
        for n in (5, 33, 70)
        for k in (511, 512, 513, 1023, 1025, 2049, 4100, 8300)
        for zero_point in ("none", "rows")
    )


@pytest.mark.parametrize("dtype", ["u8", "s8"])
@pytest.mark.parametrize(("lead", "n", "k"), [("0", 5, 7), ("3", 0, 7), ("3", 5, 0), ("2x0x3", 4, 4), ("-", 4, 9)])
def test_zero_sizes(dtype: str, lead: str, n: int, k: int) -> None:
    FAMILY.run_all(
        QLinearCase(lead=lead, n=n, k=k, input=dtype, bias=bias, input_zero_point=zero, input_scale_rows=zero == "rows")
        for bias in ("", "f32")
        for zero in ("none", "all", "rows")
    )


def test_quantised_output_saturates() -> None:
    """Values far outside the range of the output, infinite ones too, stop at its ends and do not wrap."""
    huge = torch.tensor(
        [[3e38, -3e38, 1e10, -1e10, float("inf"), float("-inf"), 3e9, -3e9, 300.0, -300.0]]
    ).T.contiguous()
    packed = torch.ops.xopt.linear_pack(torch.ones(1, 1), dtype=torch.float32)
    for dtype, ends in ((torch.int8, (127, -128)), (torch.uint8, (255, 0))):
        for zero_point in (0, 5):
            got = torch.ops.xopt.linear(
                huge, packed, 1, out_dtype=dtype, output_scale=0.01, output_zero_point=zero_point
            )
            assert got.flatten().tolist() == [ends[i % 2] for i in range(len(huge))]


@pytest.mark.parametrize("zero_point", [0, 1, -3])
def test_ties_round_to_even_before_the_zero_point(zero_point: int) -> None:
    x = torch.arange(-9.5, 10.0).reshape(-1, 1)
    packed = torch.ops.xopt.linear_pack(torch.ones(1, 1), dtype=torch.float32)
    got = torch.ops.xopt.linear(x, packed, 1, out_dtype=torch.int8, output_zero_point=zero_point)
    assert torch.equal(got, (x.round() + zero_point).to(torch.int8))
