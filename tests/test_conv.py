"""xopt::conv and the packing of its weights, against a float64 reference that gathers patches by indexing."""

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
from tests.conv_cases import VALUES, ImageCase, Operands, is_too_much, joined, last, numbers, sample_operands
from tests.families import Family, expect_equal, expect_values, flushes_denormals

Tensor = torch.Tensor
ops = torch.ops.xopt


@dataclass(frozen=True)
class ConvCase(ImageCase):
    padding: str = "0x0x0x0"  # before and after, for each dimension


GROUP_WIDTHS = (1, 2, 3, 4, 5, 8, 12, 16)


def output_size(case: ConvCase) -> list[int]:
    padding = numbers(case.padding)
    each = zip(*(numbers(text) for text in (case.size, case.kernel, case.stride, case.dilation)), strict=True)
    return [
        (size + padding[2 * i] + padding[2 * i + 1] - dilation * (kernel - 1) - 1) // stride + 1
        for i, (size, kernel, stride, dilation) in enumerate(each)
    ]


def sample_geometry(rng: random.Random) -> dict[str, Any]:
    dims = rng.choice((1, 2, 2, 2, 3))
    kernel = [rng.choice((1, 1, 2, 3, 3, 4, 5, 7)) for _ in range(dims)]
    dilation = [rng.choice((1, 1, 1, 2, 3)) for _ in range(dims)]
    padding = [rng.choice((0, 0, 1, 1, 2, 5)) for _ in range(2 * dims)]
    size = []
    for i in range(dims):
        least = dilation[i] * (kernel[i] - 1) + 1 - padding[2 * i] - padding[2 * i + 1]
        size.append(max(1, least) + rng.choice((0, 0, 1, 3, 8, 20)))
    kind = rng.random()
    groups = 1 if kind < 0.6 else rng.choice((2, 3, 4, 5, 8, 17, 33))
    channels, out_channels = (cases.pick_size(rng) if groups == 1 else rng.choice(GROUP_WIDTHS) for _ in range(2))
    if groups > 1 and rng.random() < 0.4:  # as most models have it
        out_channels = channels * rng.choice((1, 1, 2))
    if kind > 0.8:  # depthwise
        groups, channels, out_channels = max(1, cases.pick_size(rng)), 1, 1
    return {
        "images": rng.choice((1, 1, 2, 3, 0)) if rng.random() < 0.3 else 1,
        "size": joined(size),
        "channels": max(1, channels),
        "out_channels": max(1, out_channels),
        "groups": groups,
        "kernel": joined(kernel),
        "stride": joined([rng.choice((1, 1, 2, 3, 9)) for _ in range(dims)]),
        "dilation": joined(dilation),
        "padding": joined(padding),
    }


def sample(rng: random.Random) -> ConvCase:
    geometry = sample_geometry(rng)
    while is_too_much(ConvCase(**geometry), output_size(ConvCase(**geometry))):
        geometry = sample_geometry(rng)
    packed = rng.choice(cases.FLOATS)
    input_values, weight_values = cases.pick(rng, cases.VALUE_WEIGHTS), cases.pick(rng, VALUES)
    merges_groups = geometry["groups"] > 1 and (geometry["channels"], geometry["out_channels"]) != (1, 1)
    infinite = input_values == "specials" or (input_values == "huge" and packed == "f16")
    if infinite and (merges_groups or weight_values == "tiny"):
        input_values = "normal"  # infinities reach the neighbouring groups, or meet what may be flushed to zero
    if weight_values == "huge" and packed == "f16":
        weight_values = "normal"  # infinite in fp16, and nobody says what an infinite weight makes of padding
    return ConvCase(**geometry, **sample_operands(rng, packed, input_values, weight_values))


def patches(x: Tensor, case: ConvCase) -> Tensor:
    """[images * output positions, channels, positions of the kernel] by indexing."""
    padding, dims = numbers(case.padding), len(numbers(case.kernel))
    x = torch.nn.functional.pad(x, [padding[2 * i + j] for i in reversed(range(dims)) for j in range(2)])
    sizes = zip(*(numbers(text) for text in (case.kernel, case.stride, case.dilation)), strict=True)
    for dim, ((kernel, stride, dilation), out) in enumerate(zip(sizes, output_size(case), strict=True)):
        index = torch.arange(out)[:, None] * stride + torch.arange(kernel)[None, :] * dilation
        x = x.movedim(2 + 2 * dim, -1)[..., index].movedim((-2, -1), (2 + 2 * dim, 3 + 2 * dim))
    # [images, channels, out, kernel, out, kernel, ...]
    order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    return x.permute(order).reshape(-1, case.groups, case.channels * int(torch.tensor(numbers(case.kernel)).prod()))


def joined_columns(parts: list[reference.Estimate]) -> reference.Estimate:
    fields = ("value", "error", "nan_allowed", "unchecked")
    return reference.Estimate(*(torch.cat([getattr(part, field) for part in parts], 1) for field in fields))


def expected_conv(
    case: ConvCase, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, other: Tensor | None
) -> reference.Estimate:
    compute = DTYPES[case.packed]
    rows = patches(x.to(compute).double(), case)
    weights = weight.to(compute).double().reshape(case.groups, case.out_channels, -1)
    flushes = flushes_denormals(compute)
    product = joined_columns([reference.matmul(rows[:, g], weights[g], flushes) for g in range(case.groups)])
    if scale is not None:
        product = reference.multiply(product, scale.double())
    if other is not None:
        other = other.movedim(1, -1).reshape(product.value.shape)
    return reference.epilogue(case, product, bias, other)


def operands_of(case: ConvCase) -> Operands:
    weight_shape = (case.groups * case.out_channels, case.channels, *numbers(case.kernel))
    return Operands.of(case, weight_shape, output_size(case))


def convolve(case: ConvCase, operands: Operands) -> Tensor:
    x, weight, compute = operands.input, operands.weight, DTYPES[case.packed]
    packed = ops.conv_pack(weight, case.groups, dtype=compute)
    expect_equal("the unpacked weight", ops.conv_unpack(packed, weight.shape, case.groups, compute), weight.to(compute))
    geometry = {name: numbers(getattr(case, name)) for name in ("stride", "padding", "dilation")}
    got = ops.conv(x, packed, weight.shape, operands.bias, groups=case.groups, **geometry, **operands.after(case))
    return torch.as_tensor(got)


def check(case: ConvCase) -> None:
    operands, compute = operands_of(case), DTYPES[case.packed]
    x, weight = operands.input, operands.weight
    got = convolve(case, operands)
    expected = expected_conv(case, x, weight, operands.bias, operands.scale, operands.other)
    out_dtype = DTYPES[case.out or case.input]
    in_memory = (case.images, *output_size(case), case.groups * case.out_channels)
    expect_values("the output", got.movedim(1, -1), expected, in_memory, out_dtype, flushes_denormals(compute))


FAMILY = Family("conv", ConvCase, sample, check)


def test_cases(case_batch: list[ConvCase]) -> None:
    FAMILY.run_all(case_batch)


INTEGERS = {"input_values": "integers", "weight_values": "integers", "out": "f32"}
BAD = [
    {"size": "2x2", "kernel": "5x5", "padding": "2x2x2x2"},  # a kernel larger than the image
    {"size": "2x2", "kernel": "5x5", "padding": "5x5x5x5"},  # patches of nothing but padding
    {"size": "9x9", "kernel": "2x2", "stride": "5x7"},  # a stride larger than the kernel
    {"images": 0, "padding": "1x1x1x1"},
    {"size": "1x1", "kernel": "1x1", "stride": "3x3"},
    {"size": "1x40", "kernel": "1x3", "dilation": "1x9"},
    {"size": "16x16", "kernel": "4x4", "stride": "4x4"},  # patch embedding
    {"size": "23x21", "kernel": "7x7", "stride": "2x2", "padding": "3x3x3x3"},  # a stem
    {"size": "3x3", "kernel": "3x3", "padding": "0x2x1x0"},
    {"size": "11", "kernel": "10", "stride": "5", "dilation": "1", "padding": "0x0"},
    {"size": "3x4x5", "kernel": "3x1x2", "stride": "1x2x1", "dilation": "1x1x2", "padding": "1x1x0x0x1x2"},
]
CHANNELS = [
    (1, 1, 1),
    (3, 64, 1),
    (37, 41, 1),
    (130, 33, 1),
    (1, 1, 40),
    (1, 1, 131),
    (1, 2, 5),
    (4, 4, 32),
    (7, 40, 3),
]


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_lines_of_depthwise_kernels(kernel: int, stride: int) -> None:
    """Eight outputs at a time: at borders and between them, fewer, and overlapping ones; with any simple epilogue."""
    afters: list[dict[str, Any]] = [
        {},
        {"activation": "relu", "bias": "f32"},
        {"activation": "clamp", "alpha": -2.0, "beta": 30.0, "scale": "f32", "bias": "f32"},
        {"binary": "add", "activation": "relu", "activation_last": True},
        {"binary": "add", "activation": "relu"},
        {"activation": "silu"},
        {"scale": "f32", "activation": "relu", "out": "f32"},
    ]
    FAMILY.run_all(
        ConvCase(
            seed=width,
            size=f"{4 if kernel < 7 else 8}x{(width - 1) * stride + kernel}",
            groups=groups,
            kernel=f"{min(kernel, 3)}x{kernel}",
            stride=f"1x{stride}",
            padding=f"1x1x{left}x{right}",
            packed=packed,
            input=packed,
            weight=packed,
            other=packed,
            input_values="integers",
            weight_values="integers",
            other_values="integers",
            **afters[(width + groups + left) % len(afters)],
        )
        for width in (1, 7, 8, 9, 16, 17, 33, 48)
        for groups in (3, 8, 16, 31, 40, 48, 64)  # of bf16, 32 are summed at a time, or 16
        for left, right in ((0, 0), (1, 1), (2, 0), (0, 9))
        for packed in ("f32", "bf16")
        if packed == "f32" or width % 2
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("packed", cases.FLOATS)
def test_bad_geometries(packed: str) -> None:
    dtypes = {"packed": packed, "input": packed, "weight": packed}
    FAMILY.run_all(
        ConvCase(seed=seed, channels=c, out_channels=o, groups=g, layout=layout, **geometry, **dtypes, **INTEGERS)  # type: ignore[arg-type]
        for seed, (geometry, (c, o, g), layout) in enumerate(
            itertools.product(BAD, CHANNELS, ("channels_last", "contiguous", "channel_slice"))
        )
        if layout == "channels_last" or seed % 3 == 0
    )


@pytest.mark.parametrize("packed", cases.FLOATS)
def test_many_row_blocks_and_long_sums(packed: str) -> None:
    """Several blocks along every dimension, with sums that are exact."""
    sizes = [
        (600, 70, 1, "9x9", "3x3"),
        (64, 256, 1, "40x40", "1x1"),
        (32, 48, 2, "30x31", "3x3"),
        (5, 300, 1, "33x8", "5x5"),
        (64, 33, 1, "64x60", "3x3"),  # on AVX-512 and AVX2 lines of it are copied into L2 some at a time
        (48, 40, 1, "50x35", "3x3"),
        (608, 70, 1, "20x9", "3x3"),  # with AMX channels come in three groups
    ]
    FAMILY.run_all(
        ConvCase(
            images=2, channels=c, out_channels=o, groups=g, size=size, kernel=kernel,
            padding="1x1x1x1", packed=packed, input=packed, weight=packed, **INTEGERS,  # type: ignore[arg-type]
        )
        for c, o, g, size, kernel in sizes
    )  # fmt: skip


@pytest.mark.sanitize
@pytest.mark.parametrize("packed", cases.FLOATS)
def test_narrow_groups(packed: str) -> None:
    """Several in a product: vectors of columns with channels to themselves, next to each other and up to the last."""
    FAMILY.run_all(
        ConvCase(
            seed=channels, images=2, channels=channels, out_channels=channels, groups=groups, size=size, kernel=kernel,
            stride=stride, padding=padding, packed=packed, input=packed, weight=packed, **INTEGERS,  # type: ignore[arg-type]
        )
        for channels in (2, 4, 8, 16)
        for groups in (16 // channels, 32 // channels, 48 // channels, 64 // channels)
        for size, kernel, stride, padding in (
            ("9x14", "3x3", "1x1", "1x1x1x1"),
            ("9x13", "3x3", "2x2", "1x1x1x1"),
            ("11x12", "5x5", "1x1", "2x2x2x2"),
            ("6x24", "1x1", "1x1", "0x0x0x0"),
        )
    )  # fmt: skip


@given(seed=st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_any_geometry(seed: int) -> None:
    FAMILY.run(sample(random.Random(seed)))


@pytest.mark.parametrize("dtype", [DTYPES[name] for name in cases.FLOATS])
def test_no_input_channels(dtype: torch.dtype) -> None:
    """Empty sums, after which comes the bias."""
    bias = torch.randn(5).to(dtype)
    got = conv(torch.ones(1, 0, 6, 6, dtype=dtype), torch.ones(5, 0, 3, 3, dtype=dtype), bias, padding=[3] * 4)
    assert torch.equal(got, bias[:, None, None].expand(got.shape))


def test_results_do_not_depend_on_the_number_of_threads(torch_threads: None) -> None:
    x, weight, deep = last(torch.randn(3, 40, 17, 19)), torch.randn(70, 20, 3, 3), torch.randn(40, 1, 3, 3)
    even, full = last(torch.randn(1, 48, 30, 26)), torch.randn(70, 48, 3, 3)
    # Channels in several chunks, which threads share by lines or by chunks.
    wide, many = last(torch.randn(3, 700, 32, 9)).bfloat16(), torch.randn(700, 1, 3, 3).bfloat16()
    # With AMX channels in groups, whose sums fill L2 for one thread.
    long, sums = last(torch.randn(2, 608, 20, 20)).bfloat16(), torch.randn(450, 608, 3, 3).bfloat16()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append([conv(x, weight, groups=2), conv(x, deep, groups=40), conv(wide, many, groups=700)])
        results[-1] += [conv(long, sums, padding=[1] * 4)]
        results[-1] += [conv(even, full), conv(even.bfloat16(), full.bfloat16(), stride=[2, 2])]
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


# ---- Errors ---------------------------------------------------------------------------------------------------------


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, groups: int = 1, **options: Any) -> Tensor:
    dims = weight.dim() - 2
    geometry: dict[str, Any] = {"stride": [1] * dims, "padding": [0] * (2 * dims), "dilation": [1] * dims}
    packed = ops.conv_pack(weight, groups, dtype=weight.dtype)
    size = options.pop("weight_size", weight.shape)
    result: Tensor = ops.conv(x, packed, size, bias, groups=groups, **(geometry | options))
    return result


X, W = torch.randn(2, 8, 6, 6), torch.randn(12, 8, 3, 3)
ERRORS = {
    "channels": (lambda: conv(torch.randn(2, 7, 6, 6), W), r"input: expected 8 channels .*got shape \[2, 7, 6, 6\]"),
    "channels of groups": (lambda: conv(X, W, groups=2), r"input: expected 16 channels \(8 for each of 2 groups\)"),
    "dimensions": (lambda: conv(X[0], W), r"input: expected 4 dimensions .*got shape \[8, 6, 6\]"),
    "kernel": (lambda: conv(X[..., :2], W), r"input: expected at least 3 elements.*dimension 1, got 2 with padding"),
    "groups": (lambda: ops.conv_pack(W, 5, dtype=torch.float32), r"groups: expected a divisor of the 12 .*got 5"),
    "no groups": (lambda: ops.conv_pack(W, 0, dtype=torch.float32), r"groups: expected .*at least 1, got 0"),
    "weight": (lambda: ops.conv_pack(W[0, 0], 1, dtype=torch.float32), r"weight: expected \[out_channels, .* \[3, 3\]"),
    "padding": (lambda: conv(X, W, padding=[-1, 0, 0, 0]), r"padding: expected numbers of at least 0, got \[-1, 0"),
    "padding count": (lambda: conv(X, W, padding=[1, 1]), r"padding: expected 4 numbers, got 2"),
    "stride": (lambda: conv(X, W, stride=[0, 1]), r"stride: expected numbers of at least 1, got \[0, 1\]"),
    "dilation": (lambda: conv(X, W, dilation=[1, 0]), r"dilation: expected numbers of at least 1"),
    "bias": (lambda: conv(X, W, torch.randn(11)), r"bias: expected shape \[12\], got \[11\]"),
    "scale": (lambda: conv(X, W, scale=torch.randn(1)), r"scale: expected shape \[12\], got \[1\]"),
    "other": (
        lambda: conv(X, W, binary="add", other=torch.randn(2, 12, 1, 1)),
        r"other: expected the output's shape \[2, 12, 4, 4\], got \[2, 12, 1, 1\]",
    ),
    "dtype": (lambda: conv(X.int(), W), r"input: expected dtype float32 or bfloat16 or float16, got int32"),
    "packed": (
        lambda: conv(X, W, weight_size=[12, 8, 1, 1]),
        r"packed: expected a packed matrix of \[12, 8\]",
    ),
    "unpacked dtype": (
        lambda: ops.conv_unpack(ops.conv_pack(W, 1, dtype=torch.float32), W.shape, 1, torch.bfloat16),
        r"dtype: expected float32, the packed weight's, got bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(RuntimeError, match="xopt::conv.*" + message):
        call()
