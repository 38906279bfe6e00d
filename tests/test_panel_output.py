"""Products and convolutions whose blocks turn sums into output themselves, at sizes that no family of cases reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conv_cases import last
from tests.test_conv import conv
from tests.test_conv_bands import L2_BYTES

ops = torch.ops.xopt


def linear(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    result: Tensor = ops.linear(x, ops.linear_pack(weight, dtype=weight.dtype), weight.shape[0], **options)
    return result


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ["none", "relu", "clamp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [24, 32, 33, 48, 160])
def test_blocks_and_the_general_epilogue_round_alike(activation: str, dtype: torch.dtype, columns: int) -> None:
    """What is added in another dtype, or what is asked for in another, goes through the general one."""
    torch.manual_seed(columns)
    x, weight = torch.randn(70, 40), torch.randn(columns, 40)
    x[3, 7], x[5, 0], x[64] = float("nan"), float("inf"), 0.0
    x, weight = x.to(dtype), weight.to(dtype)
    added, bias = torch.randn(70, columns).to(dtype), torch.randn(columns).to(dtype)
    added[2, 1], added[9, 0], bias[0] = float("-inf"), float("nan"), -0.0
    options: dict[str, Any] = {"bias": bias, "activation": activation}
    if activation == "clamp":
        options |= {"alpha": -0.5, "beta": 1.5}
    if dtype == torch.bfloat16:
        plain = linear(x, weight, out_dtype=torch.float32, **options).to(dtype)
        torch.testing.assert_close(linear(x, weight, **options), plain, rtol=0, atol=0, equal_nan=True)
        for activation_last in (False, True):
            options |= {"binary": "add", "activation_last": activation_last}
            general = linear(x, weight, other=added.float(), **options)
            torch.testing.assert_close(
                linear(x, weight, other=added, **options), general, rtol=0, atol=0, equal_nan=True
            )
            # Residuals that are floats, as those of models with embeddings that no layer holds; halves are nobody's.
            halves = (added.float() / 3).half()
            options["out_dtype"] = torch.float32
            torch.testing.assert_close(
                linear(x, weight, other=halves.float(), **options),
                linear(x, weight, other=halves, **options),
                rtol=0,
                atol=0,
                equal_nan=True,
            )
            del options["out_dtype"]
        return
    rounded = linear(x, weight, out_dtype=torch.bfloat16, **options)
    torch.testing.assert_close(linear(x, weight, **options).bfloat16(), rounded, rtol=0, atol=0, equal_nan=True)


def expect_product(got: Tensor, x: Tensor, weight: Tensor, other: Tensor | None = None) -> None:
    """Some rows in float64, the first and the last among them."""
    rows = torch.linspace(0, len(x) - 1, 40).long()
    exact = x[rows].double() @ weight.double().T
    if other is not None:
        exact += other[rows].double()
    torch.testing.assert_close(got[rows].double(), exact.relu(), rtol=2**-7, atol=2e-2)


def test_outputs_larger_than_l2() -> None:
    columns = 160
    rows = torch.get_num_threads() * L2_BYTES * 5 // 4 // (columns * 2) // 32 * 32 + 1
    x, weight = torch.randn(rows, 32).bfloat16(), torch.randn(columns, 32).bfloat16() / 6
    other = torch.randn(rows, columns).bfloat16()
    got = linear(x, weight, activation="relu", binary="add", other=other, activation_last=True)
    expect_product(got, x, weight, other=other)
    # Fewer rows stay in L2.
    part = slice(rows - 97, rows)
    again = linear(x[part], weight, activation="relu", binary="add", other=other[part], activation_last=True)
    assert torch.equal(got[part], again)


@pytest.mark.parametrize("features", [1024, 1000])
def test_all_panels_and_several_chunks_of_rows(features: int) -> None:
    """Sums wait across a chunk's end; with 1000 features rows of A are copied."""
    rows, columns = torch.get_num_threads() * 32 * 9 + 5, 330
    x, weight = torch.randn(rows, features).bfloat16(), torch.randn(columns, features).bfloat16() / 32
    got = linear(x, weight, activation="relu")
    expect_product(got, x, weight)
    by_few = torch.cat([linear(x[i : i + 40], weight, activation="relu") for i in range(0, rows, 40)][:-1])
    assert torch.equal(got[: len(by_few)], by_few)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("rows", "features", "columns", "activation"),
    [
        (420, 1024, 1100, "relu"),  # rows 2 KB apart, read by so many panels that a copy pays; some chunks of panels
        (420, 736, 700, "gelu_erf"),  # rows where they are
        (1030, 3136, 100, "relu"),  # k in two blocks, because rows are many
        (1030, 3136, 70, "gelu_erf"),
    ],
)
def test_weights_that_stay_while_many_rows_pass(rows: int, features: int, columns: int, activation: str) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, features).bfloat16(), torch.randn(columns, features).bfloat16() / features**0.5
    bias = torch.randn(columns)
    exact = torch.addmm(bias.double(), x.double(), weight.double().T)
    exact = exact.relu() if activation == "relu" else torch.nn.functional.gelu(exact)
    options: dict[str, Any] = {"bias": bias, "activation": activation}
    got = linear(x, weight, **options)
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=2e-2)
    assert torch.equal(linear(x, weight, out_dtype=torch.float32, **options).bfloat16(), got)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("zero_point", [None, -1, 117])
@pytest.mark.parametrize("columns", [24, 64, 330])
def test_sums_of_int8_round_as_the_general_epilogue_has_them(
    dtype: torch.dtype, zero_point: int | None, columns: int
) -> None:
    torch.manual_seed(columns)
    limits = torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max + 1, (70, 200), dtype=dtype)
    weight = torch.randint(-128, 128, (columns, 200), dtype=torch.int8)
    packed = ops.linear_pack_int8(weight, torch.rand(columns) / 100)
    scale, bias, other = torch.tensor([0.02]), torch.randn(columns), torch.randn(70, columns).bfloat16()
    zero = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32)
    rows = None if zero is None else zero.expand(70)

    def product(scale: Tensor, zero: Tensor | None, **options: Any) -> Tensor:
        result: Tensor = ops.qlinear(x, scale, zero, packed, columns, bias, out_dtype=torch.bfloat16, **options)
        return result

    for options in ({}, {"activation": "relu"}, {"binary": "add", "other": other}):
        # With a scale and a zero point for each row they are no longer the columns' own.
        assert torch.equal(product(scale, zero, **options), product(scale.expand(70), rows, **options))


def test_a_convolution_whose_sums_wait_for_the_next_part_of_k() -> None:
    x, weight = torch.randn(2, 512, 12, 13).bfloat16(), torch.randn(170, 512, 3, 3).bfloat16() / 68
    x = last(x)
    got = conv(x, weight, padding=[1, 1, 1, 1], activation="relu")
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1).relu()
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=2e-2)
    plain = conv(x, weight, padding=[1, 1, 1, 1], activation="relu", out_dtype=torch.float32)
    assert torch.equal(got, plain.bfloat16())
