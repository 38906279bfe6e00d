"""The references and generators themselves: right against torch in float64, and tight enough to catch a wrong kernel.

The mutations below are what goes wrong in kernels: a term of the sum dropped, a bias one column off, rows swapped, a
truncation in place of a rounding. Each must be caught by the very comparison that the kernels are tested with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests import cases, reference
from tests.families import all_families, expect_values

Tensor = torch.Tensor

DOUBLE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "quick_gelu": lambda x: x * F.sigmoid(reference.single(1.702) * x),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.25),
    "clamp": lambda x: x.clamp(0.25, 0.5),
}


@pytest.mark.parametrize("name", sorted(DOUBLE_ACTIVATIONS))
def test_activation_is_torchs(name: str) -> None:
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    estimate = reference.activate(reference.exact(x), name, 0.25, 0.5)
    torch.testing.assert_close(estimate.value, DOUBLE_ACTIVATIONS[name](x), rtol=1e-14, atol=1e-14)
    slope = (estimate.value.diff() / x.diff()).abs().max().item()
    assert slope <= reference.ACTIVATIONS[name][1] + 1e-9, "the Lipschitz constant is too small"


@pytest.mark.parametrize("name", sorted(reference.ACTIVATIONS))
def test_fp32_activation_of_torch_is_within_the_bound(name: str) -> None:
    """The bound is one that an honest fp32 implementation keeps."""
    if name == "none":
        return
    x = torch.cat([torch.linspace(-30, 30, 20001), torch.randn(5000) * 1e-3, torch.tensor([math.nan, 0.0])])
    got = DOUBLE_ACTIVATIONS[name](x).reshape(1, -1)
    expected = reference.activate(reference.exact(x.double().reshape(1, -1)), name, 0.25, 0.5)
    expect_values("torch's", got, expected, tuple(got.shape), torch.float32)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("n", [1, 2, 33, 700])
def test_row_norm_is_torchs(kind: str, n: int) -> None:
    x, weight, bias = torch.randn(9, n, dtype=torch.float64) + 3, torch.randn(n), torch.randn(n)
    got = reference.row_norm(reference.exact(x), kind, weight, bias, 1e-5).value
    if kind == "layer_norm":
        expected = F.layer_norm(x, (n,), weight.double(), bias.double(), reference.single(1e-5))
    else:
        expected = F.rms_norm(x, (n,), weight.double(), reference.single(1e-5)) + bias.double()
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 17, 300, 2000])
def test_linear_of_torch_is_within_the_bound(dtype: torch.dtype, k: int) -> None:
    x, weight, bias = torch.randn(20, k).to(dtype), torch.randn(30, k).to(dtype), torch.randn(30)
    got = F.linear(x.float(), weight.float(), bias).to(dtype)
    product = reference.matmul(x.double(), weight.double(), flushes=False)
    expected = reference.add_bias(product, bias)
    expect_values("torch's", got, expected, (20, 30), dtype)


def test_int8_matmul_is_exact_integer_arithmetic() -> None:
    a = torch.randint(0, 256, (7, 500), dtype=torch.uint8)
    w = torch.randint(-128, 128, (9, 500), dtype=torch.int8)
    a_zero, w_zero = torch.tensor([3], dtype=torch.int32), torch.arange(9, dtype=torch.int32)
    got = reference.int8_matmul(a, a_zero, torch.ones(1), w, w_zero, torch.ones(9))
    integers = (a.long() - 3) @ (w.long() - w_zero.long().reshape(-1, 1)).T
    assert torch.equal(got.value, integers.double())
    assert bool((got.error == 0).all())


# ---- Mutations -----------------------------------------------------------------------------------------------------


def mutants(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What wrong kernels would return for x weight^T + bias."""
    x, weight, right = x.double(), weight.double(), (x.double() @ weight.double().T + bias.double())
    mutated = {
        "the last term is missing": right - x[:, -1:] * weight[:, -1:].T,
        "a term in the middle is taken twice": right + x[:, 9:10] * weight[:, 9:10].T,
        "the bias is a column off": right - bias + bias.roll(1),
        "the bias is missing": right - bias,
        "rows are swapped": right.roll(1, 0),
        "columns are swapped": right.roll(1, 1),
        "the last row is not written": torch.cat([right[:-1], torch.zeros_like(right[-1:])]),
        "the last column is not written": torch.cat([right[:, :-1], torch.zeros_like(right[:, -1:])], 1),
    }
    stored = {what: value.to(torch.float32).to(dtype) for what, value in mutated.items()}
    if dtype == torch.bfloat16:
        bits = right.float().view(torch.int32) & -65536
        stored["truncated, not rounded"] = bits.view(torch.float32).to(dtype)
        stored["rounded half up in magnitude"] = (
            ((right.float().view(torch.int32) + 0x8000) & -65536).view(torch.float32).to(dtype)
        )
    if dtype == torch.float32:
        stored["rounded to bf16 on the way"] = right.to(torch.bfloat16).float()
    return stored


@pytest.mark.parametrize("kind", ["normal", "integers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [10, 65, 400])
def test_mutants_are_caught(kind: str, dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x, weight = (cases.values(kind, (rows, k), dtype, generator) for rows in (33, 65))
    bias = cases.values(kind, (65,), torch.float32, generator)
    expected = reference.add_bias(reference.matmul(x.double(), weight.double(), flushes=True), bias)
    right = (x.double() @ weight.double().T + bias.double()).to(torch.float32).to(dtype)
    expect_values("the right result", right, expected, (33, 65), dtype, flushes=True)
    for what, wrong in mutants(x, weight, bias, dtype).items():
        if what == "rounded half up in magnitude" and kind == "normal":
            continue  # differs at exact ties alone, which random values do not hit
        if what == "rounded half up in magnitude" and not bool((wrong != right).any()):
            continue
        right_elements, _, _ = reference.acceptable(wrong, expected, flushes=True)
        assert not bool(right_elements.all()), f"not caught: {what}"


def test_quantised_mutants_are_caught() -> None:
    value = torch.arange(-20, 20).double().reshape(1, -1) / 2
    right = (value.round() + 1).to(torch.int8)
    expect_values("the right result", right, reference.exact(value), (1, 40), torch.int8, scale=1.0, zero_point=1)
    for wrong in ((value + 1).round(), (value + 0.5).floor() + 1, value.trunc() + 1, value.round()):
        with pytest.raises(AssertionError, match="wrong"):
            expect_values(
                "a mutant", wrong.to(torch.int8), reference.exact(value), (1, 40), torch.int8, scale=1.0, zero_point=1
            )


def test_what_is_left_of_a_product_with_a_flushed_factor_may_be_flushed_too() -> None:
    x = torch.tensor([[2.0**-130, 2.0**-125]], dtype=torch.bfloat16)
    weight = torch.tensor([[512.0, 1.25]], dtype=torch.bfloat16)
    expected = reference.matmul(x.double(), weight.double(), flushes=True)
    quarter = reference.multiply(expected, torch.tensor(0.25).double())  # 2^-123, and 1.25 * 2^-127, a denormal
    for right in (2.0**-123 + 1.25 * 2.0**-127, 1.25 * 2.0**-127, 0.0):
        got = torch.tensor([[right]], dtype=torch.bfloat16)
        expect_values("a right result", got, quarter, (1, 1), torch.bfloat16, flushes=True)
    got = torch.tensor([[0.0]], dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="wrong"):
        expect_values("a wrong result", got, reference.exact(quarter.value), (1, 1), torch.bfloat16, flushes=True)


def test_special_values_have_one_answer() -> None:
    value = torch.tensor([[math.inf, -math.inf, math.nan, 1e30, 0.0]]).double()
    got = torch.tensor([[math.inf, -math.inf, math.nan, 1e30, 0.0]])
    expect_values("the right result", got, reference.exact(value), (1, 5), torch.float32)
    for place, wrong in ((0, -math.inf), (0, 3.4e38), (1, math.nan), (2, 0.0), (3, math.inf), (4, math.nan)):
        mutant = got.clone()
        mutant[0, place] = wrong
        with pytest.raises(AssertionError, match="wrong"):
            expect_values("a mutant", mutant, reference.exact(value), (1, 5), torch.float32)


# ---- Cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", sorted({*cases.INPUT_LAYOUTS, "transposed"}))
def test_layouts_keep_the_values(layout: str) -> None:
    x = torch.randn(2, 3, 5)
    got = cases.laid_out(x, layout)
    assert torch.equal(got, x[:1].expand(2, 3, 5) if layout == "expanded" else x)
    assert layout in ("contiguous", "offset") or not got.is_contiguous()


def test_every_family_is_found() -> None:
    assert {family.name for family in all_families()} >= {"linear", "linear_gated", "linear_norm", "qlinear"}


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_a_line_repeats_its_case(family: object) -> None:
    """The line says all, the sequence of cases is the same in every run, and all kinds of values turn up in it."""
    first, again = list(family.cases(3, 200)), list(family.cases(3, 200))  # type: ignore[attr-defined]
    assert first == again
    for case in first:
        assert family.parse(family.line(case)) == case  # type: ignore[attr-defined]
    for field, least in (("lead", 30), ("input_values", 5)):  # of the families that have them
        assert not hasattr(first[0], field) or len({getattr(case, field) for case in first}) >= least


def test_values_of_every_kind() -> None:
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    for kind in cases.VALUE_WEIGHTS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = cases.values(kind, (rng.randint(2, 9), 40), dtype, generator)
            assert x.dtype == dtype
            assert bool(x.isfinite().all()) == (kind != "specials")
            if kind == "tiny":
                assert (
                    0
                    < x.abs().max().item()
                    < 2 * torch.finfo(dtype).smallest_normal * (256 if dtype != torch.float16 else 1)
                )
