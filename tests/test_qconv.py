"""xopt::qconv and the packing of int8 convolutions: padding is real zeros, and the integer sum is exact."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import cases, reference
from tests.cases import DTYPES
from tests.conv_cases import Operands, is_too_much, last, numbers, sample_operands
from tests.families import Family, expect_equal, expect_values
from tests.test_conv import BAD, CHANNELS, ConvCase, joined_columns, output_size, patches, sample_geometry
from tests.test_linear import sample_output
from tests.test_qlinear import scale_values, zero_points

Tensor = torch.Tensor
ops = torch.ops.xopt


@dataclass(frozen=True)
class QConvCase(ConvCase):
    input: str = "u8"
    weight: str = "s8"
    out: str = "f32"
    scales: str = "plain"  # or `powers`: powers of two, which make everything exact
    input_zero_point: str = "none"  # or `all`
    weight_scale_rows: bool = True
    weight_zero_point: str = "none"  # or `all`, `rows`
    output_scale: float = 1.0
    output_zero_point: int = 0


def sample(rng: random.Random) -> QConvCase:
    geometry = sample_geometry(rng)
    while is_too_much(QConvCase(**geometry), output_size(QConvCase(**geometry))):
        geometry = sample_geometry(rng)
    fields = sample_operands(rng, "f32", "normal", "normal") | sample_output(rng)
    fields["out"] = fields["out"] or "f32"
    powers = rng.random() < 0.4
    if fields["out"] in ("s8", "u8") and powers:
        fields["output_scale"] = rng.choice((0.5, 1.0, 4.0, 16.0))
    fields |= {
        "packed": "f32",
        "scale": "",
        "input": rng.choice(("u8", "s8")),
        "weight": "s8",
        "input_values": cases.pick(rng, cases.INT8_VALUE_WEIGHTS),
        "weight_values": cases.pick(rng, cases.INT8_VALUE_WEIGHTS),
        "other_values": "integers" if powers else "normal",
        "scales": "powers" if powers else "plain",
        "input_zero_point": rng.choice(("none", "all", "all")),
        "weight_scale_rows": rng.random() < 0.7,
        "weight_zero_point": rng.choice(("none", "none", "all", "rows")),
    }
    return QConvCase(**geometry, **fields)


def expected_qconv(
    case: QConvCase,
    operands: Operands,
    input_scale: Tensor,
    input_zero: Tensor | None,
    weight_scale: Tensor,
    weight_zero: Tensor | None,
) -> reference.Estimate:
    """In integers less the zero point, so that the patches' padding is real zeros."""
    x = operands.input.double() - (0 if input_zero is None else int(input_zero))
    rows = patches(x, case)
    weights = operands.weight.reshape(case.groups, case.out_channels, -1)
    scales = weight_scale.expand(case.groups * case.out_channels).reshape(case.groups, -1)
    zeros = None if weight_zero is None else weight_zero.expand(scales.numel()).reshape(case.groups, -1)
    products = [
        reference.int8_matmul(rows[:, g], None, input_scale, weights[g], None if zeros is None else zeros[g], scales[g])
        for g in range(case.groups)
    ]
    product, other = joined_columns(products), operands.other
    if other is not None:
        other = other.movedim(1, -1).reshape(product.value.shape)
    return reference.epilogue(case, product, operands.bias, other)


def check(case: QConvCase) -> None:
    total = case.groups * case.out_channels
    operands = Operands.of(case, (total, case.channels, *numbers(case.kernel)), output_size(case))
    weight = operands.weight
    generator = torch.Generator().manual_seed(case.seed + 1)
    input_scale = scale_values(case.scales, 1, generator)
    weight_scale = scale_values(case.scales, total if case.weight_scale_rows else 1, generator)
    input_zero = zero_points(case.input_zero_point, DTYPES[case.input], 1, generator)
    weight_zero = zero_points(case.weight_zero_point, torch.int8, total, generator)

    packed = ops.conv_pack_int8(weight, weight_scale, weight_zero, case.groups)
    unpacked, scale, zero = ops.conv_unpack_int8(packed, weight.shape, case.groups)
    expect_equal("the unpacked weight", unpacked, weight)
    expect_equal("the unpacked scale", scale, weight_scale.expand(total))
    no_zero = torch.zeros(total, dtype=torch.int32)
    expect_equal("the unpacked zero point", zero, no_zero if weight_zero is None else weight_zero.expand(total))

    geometry = {name: numbers(getattr(case, name)) for name in ("stride", "padding", "dilation")}
    after = operands.after(case)
    del after["scale"]
    got = ops.qconv(
        operands.input,
        input_scale,
        input_zero,
        packed,
        weight.shape,
        operands.bias,
        groups=case.groups,
        output_scale=case.output_scale,
        output_zero_point=case.output_zero_point,
        **geometry,
        **after,
    )
    expected = expected_qconv(case, operands, input_scale, input_zero, weight_scale, weight_zero)
    in_memory = (case.images, *output_size(case), total)
    scale_and_zero = (case.output_scale, case.output_zero_point)
    expect_values("the output", got.movedim(1, -1), expected, in_memory, DTYPES[case.out], False, *scale_and_zero)


FAMILY = Family("qconv", QConvCase, sample, check)


def test_cases(case_batch: list[QConvCase]) -> None:
    FAMILY.run_all(case_batch)


EXACT = {"scales": "powers", "input_zero_point": "all"}


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["u8", "s8"])
def test_bad_geometries(dtype: str) -> None:
    FAMILY.run_all(
        QConvCase(
            seed=seed, input=dtype, channels=c, out_channels=o, groups=g, layout=layout,
            weight_zero_point="rows" if seed % 2 else "none", **geometry, **EXACT,  # type: ignore[arg-type]
        )
        for seed, (geometry, (c, o, g), layout) in enumerate(
            itertools.product(BAD, CHANNELS, ("channels_last", "contiguous", "channel_slice"))
        )
        if layout == "channels_last" or seed % 3 == 0
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["u8", "s8"])
@pytest.mark.parametrize("weight_zero_point", ["none", "rows"])
def test_many_row_blocks_and_long_sums(dtype: str, weight_zero_point: str) -> None:
    """Several blocks along every dimension; values that saturate where products are summed in 16 bits."""
    sizes = [
        (600, 70, 1, "9x9", "3x3", "1x1"),
        (1216, 40, 1, "20x9", "3x3", "1x1"),
        (64, 256, 1, "40x40", "1x1", "1x1"),
        (32, 48, 2, "30x31", "3x3", "1x1"),
        (5, 300, 1, "33x8", "5x5", "1x1"),
        (64, 96, 1, "14x15", "3x3", "1x1"),
        (128, 40, 1, "17x9", "3x2", "2x1"),
        (192, 33, 2, "12x20", "3x3", "3x2"),
        (1, 1, 70, "30x31", "17x17", "1x1"),
    ]
    FAMILY.run_all(
        QConvCase(
            images=2, input=dtype, channels=c, out_channels=o, groups=g, size=size, kernel=kernel, stride=stride,
            padding="1x1x1x1", input_values=values, weight_values=values,
            weight_zero_point=weight_zero_point, **EXACT,  # type: ignore[arg-type]
        )
        for c, o, g, size, kernel, stride in sizes
        for values in ("normal", "extremes")
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["u8", "s8"])
def test_1x1_convolutions(dtype: str) -> None:
    """Which are products without any view of patches."""
    FAMILY.run_all(
        QConvCase(
            seed=seed,
            images=2,
            size=size,
            kernel="x".join("1" * len(numbers(size))),
            stride="x".join("1" * len(numbers(size))),
            dilation="x".join("1" * len(numbers(size))),
            padding="x".join("0" * 2 * len(numbers(size))),
            input=dtype,
            channels=channels,
            out_channels=37,
            layout=layout,
            out="s8",
            output_scale=4.0,
            weight_zero_point="rows" if seed % 2 else "none",
            **EXACT,  # type: ignore[arg-type]
        )
        for seed, (size, channels, layout) in enumerate(
            itertools.product(("11", "7x5", "3x2x4"), (1, 40, 65, 600), ("channels_last", "contiguous", "pixel_step"))
        )
    )


@given(seed=st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_any_geometry(seed: int) -> None:
    FAMILY.run(sample(random.Random(seed)))


def qconv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    groups: int = 1,
    **options: Any,
) -> Tensor:
    dims = weight.dim() - 2
    geometry: dict[str, Any] = {"stride": [1] * dims, "padding": [0] * (2 * dims), "dilation": [1] * dims}
    packed = ops.conv_pack_int8(weight, torch.ones(1), None, groups)
    packed, size = options.pop("packed", packed), options.pop("weight_size", weight.shape)
    scale = torch.ones(1) if scale is None else scale
    result: Tensor = ops.qconv(x, scale, zero_point, packed, size, bias, groups=groups, **(geometry | options))
    return result


X = torch.randint(0, 256, (2, 8, 6, 6), dtype=torch.uint8)
W = torch.randint(-128, 128, (12, 8, 3, 3), dtype=torch.int8)
ONE, ZERO = torch.ones(1), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("zero_point", [0, 7, 255])
def test_an_image_of_zeros_gives_zeros_at_its_borders_too(zero_point: int) -> None:
    x = torch.full((1, 8, 6, 6), zero_point, dtype=torch.uint8)
    zero = torch.tensor([zero_point], dtype=torch.int32)
    for weight, groups in ((W, 1), (W[:, :2], 4), (W[:8, :1], 8)):
        assert not qconv(x, weight, zero_point=zero, groups=groups, padding=[2, 1, 0, 3]).any()


ZERO_SIZES = {
    "no input channels": ((5, 0, 3, 3), (1, 0, 6, 6), 1),
    "no output channels": ((0, 8, 3, 3), (1, 8, 6, 6), 1),
    "no output channels of groups": ((0, 2, 3, 3), (1, 8, 6, 6), 4),
    "nothing but padding": ((5, 8, 3, 3), (1, 8, 0, 6), 1),
    "nothing but padding, depthwise": ((8, 1, 3, 3), (1, 8, 0, 0), 8),
    "no images": ((5, 8, 3, 3), (0, 8, 5, 6), 1),
}


@pytest.mark.parametrize("weight_zero_point", [None, ZERO + 5])
@pytest.mark.parametrize("name", ZERO_SIZES)
def test_zero_sizes(name: str, weight_zero_point: Tensor | None) -> None:
    """Empty sums, after which comes the bias."""
    weight_size, size, groups = ZERO_SIZES[name]
    weight, bias = torch.ones(weight_size, dtype=torch.int8), torch.randn(weight_size[0])
    packed = ops.conv_pack_int8(weight, ONE, weight_zero_point, groups)
    unpacked, scale, _ = ops.conv_unpack_int8(packed, weight_size, groups)
    assert unpacked.shape == weight.shape
    assert scale.shape == bias.shape
    x = torch.ones(size, dtype=torch.uint8)
    got = qconv(x, weight, zero_point=ZERO + 9, bias=bias, groups=groups, padding=[3] * 4, packed=packed)
    assert torch.equal(got, bias[:, None, None].expand(got.shape))


def test_as_torch_has_it_in_floats() -> None:
    zero, scale = torch.tensor([100], dtype=torch.int32), torch.tensor([0.25])
    got = qconv(X, W, scale, zero, padding=[1] * 4, stride=[2, 2], activation="relu")
    real = (X.float() - 100) * 0.25
    expected = torch.nn.functional.conv2d(real.double(), W.double(), padding=1, stride=2).relu()
    assert torch.equal(got.double(), expected)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, deep = last(torch.randint(0, 256, (3, 40, 17, 19), dtype=torch.uint8)), W[:, :1].repeat(4, 1, 1, 1)[:40]
    weight, scale = torch.randint(-128, 128, (70, 20, 3, 3), dtype=torch.int8), torch.tensor([0.037])
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append([qconv(x, w, scale, groups=g, padding=[1] * 4) for w, g in ((weight, 2), (deep, 40))])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


# ---- Errors ---------------------------------------------------------------------------------------------------------

FLOAT_PACKED = ops.conv_pack(W.float(), 1, dtype=torch.float32)
ERRORS = {
    "dtype": (lambda: qconv(X.float(), W), r"input: expected dtype uint8 or int8, got float32"),
    "channels": (lambda: qconv(X[:, :7], W), r"input: expected 8 channels .*got shape \[2, 7, 6, 6\]"),
    "dimensions": (lambda: qconv(X[0], W), r"input: expected 4 dimensions .*got shape \[8, 6, 6\]"),
    "kernel": (lambda: qconv(X[..., :2], W), r"input: expected at least 3 elements.*dimension 1, got 2 with padding"),
    "scale of rows": (lambda: qconv(X, W, torch.ones(2)), r"input_scale: expected shape \[1\], one value .*got \[2\]"),
    "scale's dtype": (lambda: qconv(X, W, ONE.double()), r"input_scale: expected dtype float32, got float64"),
    "zero points": (lambda: qconv(X, W, None, ZERO.expand(3)), r"input_zero_point: expected shape \[1\], .*got \[3\]"),
    "zero point's dtype": (lambda: qconv(X, W, None, ONE), r"input_zero_point: expected dtype int32, got float32"),
    "zero point": (lambda: qconv(X, W, None, ZERO - 1), r"input_zero_point: expected 0 to 255, .*got -1"),
    "signed zero point": (
        lambda: qconv(X.to(torch.int8), W, None, ZERO + 128),
        r"input_zero_point: expected -128 to 127, .*got 128",
    ),
    "packed": (lambda: qconv(X, W, packed=FLOAT_PACKED), r"packed: expected a weight as made by conv_pack_int8"),
    "weight size": (lambda: qconv(X, W, weight_size=[12, 8, 1, 1]), r"packed: expected a packed matrix of \[12, 8\]"),
    "bias": (lambda: qconv(X, W, bias=torch.randn(11)), r"bias: expected shape \[12\], got \[11\]"),
    "padding": (lambda: qconv(X, W, padding=[-1, 0, 0, 0]), r"padding: expected numbers of at least 0, got \[-1, 0"),
    "stride": (lambda: qconv(X, W, stride=[1]), r"stride: expected 2 numbers, got 1"),
    "other": (
        lambda: qconv(X, W, binary="add", other=torch.randn(12)),
        r"other: expected the output's shape \[2, 12, 4, 4\], got \[12\]",
    ),
    "out_dtype": (lambda: qconv(X, W, out_dtype=torch.int32), r"out_dtype: expected one of float32, .*got int32"),
    "output_scale": (lambda: qconv(X, W, output_scale=2.0), r"output_scale: expected 1, since out_dtype is no int8"),
    "output_zero_point": (
        lambda: qconv(X, W, out_dtype=torch.uint8, output_zero_point=256),
        r"output_zero_point: expected 0 to 255, got 256",
    ),
    "conv of int8": (
        lambda: ops.conv(
            X.float(), ops.conv_pack_int8(W, ONE), W.shape, stride=[1, 1], padding=[0] * 4, dilation=[1, 1]
        ),
        r"packed: expected a weight as made by conv_pack$",
    ),
    "weight": (lambda: ops.conv_pack_int8(W.float(), ONE), r"weight: expected dtype int8, got float32"),
    "weight's scale": (lambda: ops.conv_pack_int8(W, torch.ones(3)), r"scale: expected shape \[12\], got \[3\]"),
    "weight's zero point": (
        lambda: ops.conv_pack_int8(W, ONE, ZERO - 129),
        r"zero_point: expected -128 to 127, values of the weight, got -129",
    ),
    "groups": (lambda: ops.conv_pack_int8(W, ONE, None, 5), r"groups: expected a divisor of the 12 .*got 5"),
    "unpacked": (lambda: ops.conv_unpack_int8(FLOAT_PACKED, W.shape, 1), r"packed: expected .* made by conv_pack_int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(RuntimeError, match="xopt::.*conv.*" + message):
        call()
