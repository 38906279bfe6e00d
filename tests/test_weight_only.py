"""xopt::linear_weight_only and the packing of weights of 8 and 4 bits, against the float64 reference."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import xopt
from tests import cases, reference
from tests.cases import DTYPES
from tests.families import Family, expect_values, flushes_denormals
from tests.test_linear import OTHER_LAYOUTS, sample_activation, sample_extras

Tensor = torch.Tensor
ops = torch.ops.xopt

WEIGHT_LAYOUTS = {"contiguous": 60, "transposed": 20, "sliced": 10, "k_strided": 10}


@dataclass(frozen=True)
class WeightOnlyCase:
    seed: int = 0
    lead: str = "1"
    n: int = 1
    k: int = 1
    bits: int = 8
    group: int = 0  # 0: all of k
    gated: bool = False
    input: str = "f32"
    out: str = ""
    input_values: str = "normal"
    powers: bool = False  # scales that are powers of two: with integers, everything is exact
    zero_point: bool = False
    input_layout: str = "contiguous"
    weight_layout: str = "contiguous"
    scale_layout: str = "contiguous"
    bias: str = ""
    bias_layout: str = "contiguous"
    up_bias: str = ""
    activation: str = "none"
    alpha: float = 0.0
    beta: float = 0.0
    binary: str = "none"
    other: str = "f32"
    other_row: bool = False
    other_layout: str = "contiguous"
    activation_last: bool = False


def sample(rng: random.Random) -> WeightOnlyCase:
    m, n, k = cases.pick_sizes(rng)
    gated = rng.random() < 0.2
    exact = rng.random() < 0.5
    groups = [size for size in (32, 64, 96, 128) if size <= k]
    extras: dict[str, Any] = sample_activation(rng) if gated else sample_extras(rng)
    return WeightOnlyCase(
        seed=rng.randrange(1_000_000),
        lead=cases.pick_lead(rng, m),
        n=n,
        k=k,
        bits=rng.choice((4, 8)),
        group=rng.choice((0, *groups)),
        gated=gated,
        input=rng.choice(cases.FLOATS),
        out=rng.choice(("", "", *cases.FLOATS)),
        input_values="integers" if exact else rng.choice(("normal", "normal", "one_hot", "zeros", "ones")),
        powers=exact,
        zero_point=rng.random() < 0.5,
        input_layout=cases.pick(rng, cases.INPUT_LAYOUTS),
        weight_layout=cases.pick(rng, WEIGHT_LAYOUTS),
        scale_layout=cases.pick(rng, OTHER_LAYOUTS),
        up_bias=rng.choice(("", *cases.FLOATS)) if gated else "",
        **extras,
    )


@dataclass
class Weight:
    packed: Tensor
    value: Tensor
    """In fp32, as the codes say; of a gated pair the rows of both."""


def random_weight(case: WeightOnlyCase, generator: torch.Generator) -> Weight:
    rows, group = case.n * (2 if case.gated else 1), case.group or case.k
    groups = -(-case.k // group) if group else 0
    low, high = (-8, 7) if case.bits == 4 else (-128, 127)
    codes = torch.randint(low, high + 1, (rows, case.k), generator=generator, dtype=torch.int8)
    if case.powers:
        scale = torch.exp2(torch.randint(-3, 2, (rows, groups), generator=generator).float())
    else:
        scale = torch.rand(rows, groups, generator=generator) + 0.01
    zero = torch.randint(low, high + 1, (rows, groups), generator=generator, dtype=torch.int32)
    zero = zero if case.zero_point else torch.zeros_like(zero)

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(group, 1)[:, : case.k] if group else values[:, :0]

    packed = ops.linear_pack_weight_only(
        cases.laid_out(codes, case.weight_layout),
        cases.laid_out(scale, case.scale_layout) if case.scale_layout != "expanded" else scale,
        zero if case.zero_point else None,
        bits=case.bits,
        group_size=group,
        gated=case.gated,
    )
    return Weight(packed, (codes.float() - spread(zero)) * spread(scale))


def expected(
    case: WeightOnlyCase, x: Tensor, weight: Tensor, bias: Tensor | None, up_bias: Tensor | None, other: Tensor | None
) -> reference.Estimate:
    compute = DTYPES[case.input]
    flushes = flushes_denormals(compute)
    rows = x.reshape(cases.row_count(case.lead), case.k).double()
    multiplied = weight.to(compute).double()
    product = reference.matmul(rows, multiplied[: case.n], flushes)
    if case.gated:
        gate = reference.activate_as(case, reference.add_bias(product, bias))
        up = reference.add_bias(reference.matmul(rows, multiplied[case.n :], flushes), up_bias)
        return reference.multiply_estimates(gate, up)
    if other is not None and not case.other_row:
        other = other.reshape(product.value.shape)
    return reference.epilogue(case, product, bias, other)


def check(case: WeightOnlyCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    lead = cases.lead_dims(case.lead)
    kind = "integers" if case.powers else "normal"
    x = cases.tensor(case.input_values, (*lead, case.k), DTYPES[case.input], generator, case.input_layout)
    weight = random_weight(case, generator)
    bias = up_bias = other = None
    if case.bias:
        bias = cases.tensor(kind, (case.n,), DTYPES[case.bias], generator, case.bias_layout)
    if case.up_bias:
        up_bias = cases.tensor(kind, (case.n,), DTYPES[case.up_bias], generator)
    if case.binary != "none":
        shape = (case.n,) if case.other_row else (*lead, case.n)
        other = cases.tensor(kind, shape, DTYPES[case.other], generator, case.other_layout)
    got = ops.linear_weight_only(
        x,
        weight.packed,
        case.n,
        bias,
        up_bias,
        gated=case.gated,
        activation=case.activation,
        alpha=case.alpha,
        beta=case.beta,
        binary=case.binary,
        other=other,
        activation_last=case.activation_last,
        out_dtype=DTYPES[case.out] if case.out else None,
    )
    expect_values(
        "the output",
        got,
        expected(case, x, weight.value, bias, up_bias, other),
        (*lead, case.n),
        DTYPES[case.out or case.input],
        flushes_denormals(DTYPES[case.input]),
    )


FAMILY = Family("weight_only", WeightOnlyCase, sample, check)


def test_cases(case_batch: list[WeightOnlyCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("bits", [4, 8])
def test_tails(bits: int) -> None:
    FAMILY.run_all(
        WeightOnlyCase(
            seed=n * 1000 + k,
            lead=str(m),
            n=n,
            k=k,
            bits=bits,
            group=group if group <= k else 0,
            input=dtype,
            input_values="integers",
            powers=True,
            zero_point=True,
        )
        for dtype in cases.FLOATS
        for m, group in ((1, 0), (5, 32))
        for n in (1, 15, 17, 33, 64)
        for k in (1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 1025)
    )


def test_many_panels_are_decoded_in_turns() -> None:
    """A weight that is larger in floats than what is decoded at once."""
    FAMILY.run(
        WeightOnlyCase(
            lead="3", n=2000, k=1100, group=128, input="bf16", input_values="integers", powers=True, bias="f32"
        )
    )


def test_a_pair_counts_as_two_products() -> None:
    """Also where its bytes are those of a single weight of 8 bits in groups of 32."""
    codes, scale = torch.ones(128, 128, dtype=torch.int8), torch.ones(128, 4)
    pair = ops.linear_pack_weight_only(codes, scale[:, :2].contiguous(), bits=4, group_size=64, gated=True)
    single = ops.linear_pack_weight_only(codes[:64], scale[:64], bits=8, group_size=32)
    assert pair.shape == single.shape
    x = torch.ones(3, 128)
    for packed, gated in ((pair, True), (single, False)):

        def call(packed: Tensor = packed, gated: bool = gated) -> Any:
            return ops.linear_weight_only(x, packed, 64, gated=gated)

        taken = xopt.profile(call, steps=1, warmup=1, roofs=False)
        with FlopCounterMode(display=False) as counter:
            call()
        assert taken.flop == counter.get_total_flops() == (2 if gated else 1) * 2 * 3 * 64 * 128


def weight_of(n: int, k: int, **options: Any) -> Tensor:
    fields = {"bits": 4, "group_size": k, **options}
    return torch.as_tensor(
        ops.linear_pack_weight_only(torch.zeros(n, k, dtype=torch.int8), torch.ones(n, -(-k // k)), **fields)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weight_of(4, 64, bits=3), "bits: expected 4 or 8, got 3"),
        (lambda: weight_of(4, 64, group_size=48), "group_size: expected a multiple of 32 .* got 48"),
        (lambda: weight_of(4, 64, group_size=32), r"scale: expected shape \[4, 2\], got \[4, 1\]"),
        (lambda: weight_of(3, 64, gated=True), "weight: expected as many rows of the gate"),
        (
            lambda: ops.linear_pack_weight_only(
                torch.full((1, 32), 8, dtype=torch.int8), torch.ones(1, 1), bits=4, group_size=32
            ),
            "weight: expected values of 4 bits",
        ),
        (lambda: ops.linear_weight_only(torch.ones(1, 65), weight_of(4, 64), 4), "input: expected a last .* 64.* 65"),
        (lambda: ops.linear_weight_only(torch.ones(1, 64), weight_of(4, 64), 5), "out_features: expected 4.* got 5"),
        (lambda: ops.linear_weight_only(torch.ones(1, 64), weight_of(4, 64)[:-1], 4), "packed: .* truncated"),
        (
            lambda: ops.linear_weight_only(
                torch.ones(1, 64), ops.linear_pack(torch.ones(4, 64), dtype=torch.float32), 4
            ),
            "packed: .* does not begin with 'xoptcode'",
        ),
        (
            lambda: ops.linear_weight_only(torch.ones(1, 64), weight_of(4, 64), 4, None, torch.ones(4)),
            "up_bias: expected None",
        ),
        (
            lambda: ops.linear_weight_only(torch.ones(1, 64), weight_of(4, 64), 4, gated=True),
            "gated: expected False for a single weight, got True",
        ),
        (
            lambda: ops.linear_weight_only(torch.ones(1, 64), weight_of(4, 64, gated=True), 2),
            "gated: expected True for a pair, got False",
        ),
    ],
)
def test_errors_name_the_argument(call: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
