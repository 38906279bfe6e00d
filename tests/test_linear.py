"""xopt::linear and the packing of its weights, against the float64 reference."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests import cases, reference
from tests.cases import DTYPES
from tests.families import Family, expect_equal, expect_values, flushes_denormals

Tensor = torch.Tensor

UNPACK_LIMIT = 20_000  # weights up to this many elements are unpacked again and compared bit by bit


@dataclass(frozen=True)
class LinearCase:
    seed: int = 0
    lead: str = "1"
    n: int = 1
    k: int = 1
    packed: str = "f32"
    input: str = "f32"
    weight: str = "f32"
    out: str = ""  # empty: not said
    input_values: str = "normal"
    weight_values: str = "normal"
    other_values: str = "normal"
    input_layout: str = "contiguous"
    weight_layout: str = "contiguous"
    bias: str = ""  # dtype, or empty: none
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


WEIGHT_LAYOUTS = {"contiguous": 60, "transposed": 15, "sliced": 10, "k_strided": 5, "expanded": 3, "offset": 7}
OTHER_LAYOUTS = {"contiguous": 60, "offset": 10, "sliced": 10, "swapped": 10, "expanded": 5, "k_strided": 5}


def sample_activation(rng: random.Random) -> dict[str, object]:
    name = rng.choice(list(reference.ACTIVATIONS))
    fields: dict[str, object] = {"activation": name}
    if name == "leaky_relu":
        fields["alpha"] = rng.choice((0.01, 0.2, 1.5, -0.5))
    elif name == "clamp":
        fields["alpha"], fields["beta"] = rng.choice(((-1.0, 1.0), (0.0, 6.0), (-0.3, 0.1), (2.0, 2.0)))
    return fields


def sample_input(rng: random.Random) -> dict[str, object]:
    """Seed, sizes, dtypes, values and layouts of input and weight, which all float families share."""
    m, n, k = cases.pick_sizes(rng)
    packed = rng.choice(cases.FLOATS)
    input_values = cases.pick(rng, cases.VALUE_WEIGHTS)
    weight_values = cases.pick(rng, cases.VALUE_WEIGHTS)
    if "integers" in (input_values, weight_values) and rng.random() < 0.7:
        input_values = weight_values = "integers"
    if {"tiny", "specials"} <= {input_values, weight_values}:
        weight_values = "normal"  # infinity times what may be flushed to zero has no one answer
    return {
        "seed": rng.randrange(1_000_000),
        "lead": cases.pick_lead(rng, m),
        "n": n,
        "k": k,
        "packed": packed,
        "input": packed if rng.random() < 0.5 else rng.choice(cases.FLOATS),
        "weight": packed if rng.random() < 0.6 else rng.choice(cases.FLOATS),
        "input_values": input_values,
        "weight_values": weight_values,
        "other_values": "integers" if input_values == weight_values == "integers" else "normal",
        "input_layout": cases.pick(rng, cases.INPUT_LAYOUTS),
        "weight_layout": cases.pick(rng, WEIGHT_LAYOUTS),
    }


def sample_output(rng: random.Random) -> dict[str, object]:
    """Any dtype of the output, int8 with its scale."""
    out = rng.choice(("", "", "f32", "bf16", "f16", "s8", "u8"))
    fields: dict[str, object] = {"out": out}
    if out in ("s8", "u8"):
        fields["output_scale"] = rng.choice((1.0, 0.5, 2.0, 0.037, 0.11, 7.3))
        fields["output_zero_point"] = rng.choice((0, 0, 1, -3, 17) if out == "s8" else (0, 1, 127, 128, 255))
    return fields


def sample_extras(rng: random.Random) -> dict[str, object]:
    """Bias, activation and binary in any combination."""
    fields: dict[str, object] = {}
    if rng.random() < 0.5:
        fields["bias"] = rng.choice(cases.FLOATS)
        fields["bias_layout"] = cases.pick(rng, cases.VECTOR_LAYOUTS)
    if rng.random() < 0.7:
        fields.update(sample_activation(rng))
    if rng.random() < 0.5:
        fields["binary"] = rng.choice(("add", "mul"))
        fields["other"] = rng.choice(cases.FLOATS)
        fields["other_row"] = rng.random() < 0.3
        fields["other_layout"] = cases.pick(rng, OTHER_LAYOUTS)
        fields["activation_last"] = rng.random() < 0.5
    return fields


def sample(rng: random.Random) -> LinearCase:
    return LinearCase(**{**sample_input(rng), **sample_output(rng), **sample_extras(rng)})  # type: ignore[arg-type]


def linear_arguments(
    case: LinearCase, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Input, weight, bias and other of a case."""
    lead = cases.lead_dims(case.lead)
    x = cases.tensor(case.input_values, (*lead, case.k), DTYPES[case.input], generator, case.input_layout)
    weight = cases.tensor(case.weight_values, (case.n, case.k), DTYPES[case.weight], generator, case.weight_layout)
    bias = other = None
    if case.bias:
        bias = cases.tensor(case.other_values, (case.n,), DTYPES[case.bias], generator, case.bias_layout)
    if case.binary != "none":
        shape = (case.n,) if case.other_row else (*lead, case.n)
        other = cases.tensor(case.other_values, shape, DTYPES[case.other], generator, case.other_layout)
    return x, weight, bias, other


def expected_linear(
    case: LinearCase, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None
) -> reference.Estimate:
    compute = DTYPES[case.packed]
    rows = x.reshape(cases.row_count(case.lead), case.k).to(compute).double()
    product = reference.matmul(rows, weight.to(compute).double(), flushes_denormals(compute))
    if other is not None and not case.other_row:
        other = other.reshape(product.value.shape)
    return reference.epilogue(case, product, bias, other)


def check(case: LinearCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    x, weight, bias, other = linear_arguments(case, generator)
    compute = DTYPES[case.packed]
    packed = torch.ops.xopt.linear_pack(weight, dtype=compute)
    if weight.numel() <= UNPACK_LIMIT:
        unpacked = torch.ops.xopt.linear_unpack(packed, case.n, case.k, compute)
        expect_equal("the unpacked weight", unpacked, weight.to(compute))
    got = torch.ops.xopt.linear(
        x,
        packed,
        case.n,
        bias,
        activation=case.activation,
        alpha=case.alpha,
        beta=case.beta,
        binary=case.binary,
        other=other,
        activation_last=case.activation_last,
        out_dtype=DTYPES[case.out] if case.out else None,
        output_scale=case.output_scale,
        output_zero_point=case.output_zero_point,
    )
    expect_values(
        "the output",
        got,
        expected_linear(case, x, weight, bias, other),
        (*cases.lead_dims(case.lead), case.n),
        DTYPES[case.out or case.input],
        flushes_denormals(compute),
        case.output_scale,
        case.output_zero_point,
    )


FAMILY = Family("linear", LinearCase, sample, check)


def test_cases(case_batch: list[LinearCase]) -> None:
    FAMILY.run_all(case_batch)


def exact_case(m: int, n: int, k: int, packed: str, **more: Any) -> LinearCase:
    """Of whole numbers, so that results are compared exactly."""
    values = {"input_values": "integers", "weight_values": "integers"}
    given = {"seed": m * 10_000 + n * 100 + k, **values, **more}
    return LinearCase(lead=str(m), n=n, k=k, packed=packed, input=packed, weight=packed, **given)


@pytest.mark.sanitize
def test_tails() -> None:
    """Every size around a tile in every dimension, with values that are compared exactly."""
    sizes = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65)
    FAMILY.run_all(
        exact_case(m, n, k, packed, out="f32")
        for packed in cases.FLOATS
        for m in (1, 2, 3, 4, 5, 16, 17, 33)
        for n in sizes
        for k in sizes
        if (m + n + k) % 2 == 0 or m in (1, 17)
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("packed", cases.FLOATS)
@pytest.mark.parametrize(("activation", "alpha", "beta"), [("none", 0, 0), ("relu", 0, 0), ("clamp", -3, 40)])
def test_simple_epilogues_at_tails(activation: str, alpha: float, beta: float, packed: str) -> None:
    """Those that are done in registers: every width of a last vector, last rows, sums of several k blocks."""
    FAMILY.run_all(
        exact_case(
            m,
            n,
            k,
            packed,
            other_values="integers",
            bias="f32" if m % 2 else "",
            activation=activation,
            alpha=alpha,
            beta=beta,
            binary="none" if order is None else "add",
            activation_last=bool(order),
            other_row=n % 3 == 0,
        )
        for m in (1, 5, 6, 13)
        for n in (1, 7, 8, 9, 15, 17, 24, 25, 32, 33, 70)
        for k in (3, 16, 20, 24, 400)
        for order in (None, False, True)
        if (m + n + k) % 2 == 0
    )


@pytest.mark.parametrize("packed", cases.FLOATS)
def test_long_sums(packed: str) -> None:
    """Sums over several blocks along K, of integers, so that not one term may be missing."""
    FAMILY.run_all(
        exact_case(m, n, k, packed, seed=m * 10_000 + k, out="f32", bias="f32")
        for m in (1, 4, 5, 17, 40)
        for n in (5, 33, 70)
        for k in (255, 256, 257, 511, 513, 1023, 1025, 2049, 4100)
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("packed", cases.FLOATS)
def test_rows_that_meet_in_the_cache(packed: str) -> None:
    """Rows that all begin in one set of L1 are read where they are by lower blocks, or copied where columns are many;
    and outputs that leave L2 are fetched to be written."""
    FAMILY.run_all(
        exact_case(m, n, k, packed, out=packed, bias="f32", binary="add", other=packed, other_values="integers")
        for m, n in ((15, 33), (21, 70), (29, 1030), (150, 8))
        for k in (1024, 2048, 3072, 3080)
    )
    FAMILY.run_all(exact_case(3001, 300, k, packed, out=packed, binary="add", other=packed) for k in (16, 700))


@pytest.mark.parametrize("packed", cases.FLOATS)
@pytest.mark.parametrize(
    ("lead", "n", "k"), [("0", 5, 7), ("3", 0, 7), ("3", 5, 0), ("2x0x3", 4, 4), ("0", 0, 0), ("-", 3, 0)]
)
def test_zero_sizes(packed: str, lead: str, n: int, k: int) -> None:
    """Nothing in, nothing out; no terms at all: the epilogue of zero."""
    FAMILY.run_all(
        LinearCase(lead=lead, n=n, k=k, packed=packed, input=packed, weight=packed, bias=bias, activation=activation)
        for bias in ("", "f32", "bf16")
        for activation in ("none", "sigmoid")
    )


@pytest.mark.parametrize("packed", cases.FLOATS)
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_special_row_stays_in_its_row(packed: str, special: float) -> None:
    """An infinity or NaN in one row of the input leaves the other rows bit for bit as they were."""
    generator = torch.Generator().manual_seed(5)
    for m, n, k in ((2, 33, 17), (5, 16, 64), (17, 40, 100), (33, 7, 31)):
        x = torch.randn(m, k, generator=generator)
        packed_weight = torch.ops.xopt.linear_pack(torch.randn(n, k, generator=generator), dtype=DTYPES[packed])
        before = torch.ops.xopt.linear(x, packed_weight, n)
        for row in (0, m // 2, m - 1):
            spoilt = x.clone()
            spoilt[row, -1] = special
            after = torch.ops.xopt.linear(spoilt, packed_weight, n)
            assert not after[row].isfinite().any()
            others = [r for r in range(m) if r != row]
            assert torch.equal(after[others], before[others]), f"row {row} of {m}x{n}x{k} reached other rows"
