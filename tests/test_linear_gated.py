"""xopt::linear_gated, a gate and an up projection in one pass, against the float64 reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tests import cases, reference
from tests.cases import DTYPES
from tests.families import Family, expect_equal, expect_values, flushes_denormals
from tests.test_linear import UNPACK_LIMIT, WEIGHT_LAYOUTS, sample_activation, sample_input

Tensor = torch.Tensor


@dataclass(frozen=True)
class LinearGatedCase:
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
    up_layout: str = "contiguous"
    gate_bias: str = ""
    up_bias: str = ""
    bias_layout: str = "contiguous"
    activation: str = "silu"
    alpha: float = 0.0
    beta: float = 0.0


def sample(rng: random.Random) -> LinearGatedCase:
    fields = sample_input(rng)
    fields["up_layout"] = cases.pick(rng, WEIGHT_LAYOUTS)
    fields["out"] = rng.choice(("", "", "f32", "bf16", "f16"))
    if rng.random() < 0.6:
        fields.update(sample_activation(rng))
    for name in ("gate_bias", "up_bias"):
        if rng.random() < 0.5:
            fields[name] = rng.choice(cases.FLOATS)
    fields["bias_layout"] = cases.pick(rng, cases.VECTOR_LAYOUTS)
    return LinearGatedCase(**fields)  # type: ignore[arg-type]


def check(case: LinearGatedCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    lead, compute = cases.lead_dims(case.lead), DTYPES[case.packed]
    shape, dtype = (case.n, case.k), DTYPES[case.weight]
    x = cases.tensor(case.input_values, (*lead, case.k), DTYPES[case.input], generator, case.input_layout)
    gate = cases.tensor(case.weight_values, shape, dtype, generator, case.weight_layout)
    up = cases.tensor(case.weight_values, shape, dtype, generator, case.up_layout)
    gate_bias, up_bias = (
        cases.tensor(case.other_values, (case.n,), DTYPES[name], generator, case.bias_layout) if name else None
        for name in (case.gate_bias, case.up_bias)
    )
    packed = torch.ops.xopt.linear_pack_gated(gate, up, dtype=compute)
    if gate.numel() <= UNPACK_LIMIT:
        for name, got, weight in zip(
            ("gate", "up"), torch.ops.xopt.linear_unpack_gated(packed, case.n, case.k, compute), (gate, up), strict=True
        ):
            expect_equal(f"the unpacked {name}", got, weight.to(compute))
    got = torch.ops.xopt.linear_gated(
        x,
        packed,
        case.n,
        gate_bias,
        up_bias,
        activation=case.activation,
        alpha=case.alpha,
        beta=case.beta,
        out_dtype=DTYPES[case.out] if case.out else None,
    )
    rows = x.reshape(cases.row_count(case.lead), case.k).to(compute).double()
    flushes = flushes_denormals(compute)
    left = reference.add_bias(reference.matmul(rows, gate.to(compute).double(), flushes), gate_bias)
    right = reference.add_bias(reference.matmul(rows, up.to(compute).double(), flushes), up_bias)
    expected = reference.multiply_estimates(reference.activate_as(case, left), right)
    expect_values("the output", got, expected, (*lead, case.n), DTYPES[case.out or case.input], flushes)


FAMILY = Family("linear_gated", LinearGatedCase, sample, check)


def test_cases(case_batch: list[LinearGatedCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
def test_tails() -> None:
    """Every size around a tile, gate and up told apart by exact values."""
    FAMILY.run_all(
        LinearGatedCase(
            seed=m * 10_000 + n * 100 + k,
            lead=str(m),
            n=n,
            k=k,
            packed=packed,
            input=packed,
            weight=packed,
            out="f32",
            input_values="integers",
            weight_values="integers",
            activation="relu",
        )
        for packed in cases.FLOATS
        for m in (1, 3, 5, 16, 17)
        for n in (1, 2, 15, 16, 17, 31, 32, 33, 63, 65)
        for k in (1, 15, 16, 17, 31, 33, 63, 65)
    )


@pytest.mark.parametrize("packed", cases.FLOATS)
@pytest.mark.parametrize(("lead", "n", "k"), [("0", 5, 7), ("3", 0, 7), ("3", 5, 0), ("2x0x3", 4, 4)])
def test_zero_sizes(packed: str, lead: str, n: int, k: int) -> None:
    FAMILY.run_all(
        LinearGatedCase(lead=lead, n=n, k=k, packed=packed, input=packed, weight=packed, gate_bias=bias, up_bias="f32")
        for bias in ("", "bf16")
    )
