"""xopt::conv_transpose and the packing of its weights, against a float64 reference that spreads the input out with
zeros and convolves it with the reversed kernel."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests import cases
from tests.cases import DTYPES
from tests.conv_cases import VALUES, ImageCase, Operands, is_too_much, joined, last, numbers, sample_operands
from tests.families import Family, expect_equal, expect_values, flushes_denormals
from tests.test_conv import ConvCase, expected_conv

Tensor = torch.Tensor
ops = torch.ops.xopt


@dataclass(frozen=True)
class ConvTransposeCase(ImageCase):
    padding: str = "0x0"
    output_padding: str = "0x0"


def output_size(case: ConvTransposeCase) -> list[int]:
    fields = (case.size, case.kernel, case.stride, case.dilation, case.padding, case.output_padding)
    return [
        (size - 1) * stride + dilation * (kernel - 1) + extra + 1 - 2 * padding
        for size, kernel, stride, dilation, padding, extra in zip(*map(numbers, fields), strict=True)
    ]


def sample_geometry(rng: random.Random) -> dict[str, Any]:
    dims = rng.choice((1, 2, 2, 2, 3))
    kernel = [rng.choice((1, 2, 2, 3, 3, 4, 5)) for _ in range(dims)]
    stride = [rng.choice((1, 2, 2, 2, 3, 4, 7)) for _ in range(dims)]
    dilation = [rng.choice((1, 1, 1, 2, 3)) for _ in range(dims)]
    kind = rng.random()
    groups = 1 if kind < 0.6 else rng.choice((2, 3, 4, 8, 17, 33))
    channels, out_channels = (cases.pick_size(rng) if groups == 1 else rng.choice((1, 2, 3, 5, 16)) for _ in range(2))
    if kind > 0.8:  # depthwise
        groups, channels, out_channels = max(1, cases.pick_size(rng)), 1, 1
    return {
        "images": rng.choice((1, 1, 2, 3, 0)) if rng.random() < 0.3 else 1,
        "size": joined([rng.choice((1, 1, 2, 3, 5, 9)) for _ in range(dims)]),
        "channels": max(1, channels),
        "out_channels": max(1, out_channels),
        "groups": groups,
        "kernel": joined(kernel),
        "stride": joined(stride),
        "dilation": joined(dilation),
        "padding": joined([rng.choice((0, 0, 1, 1, 2, 5)) for _ in range(dims)]),
        "output_padding": joined([rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]),
    }


def is_possible(geometry: dict[str, Any]) -> bool:
    case = ConvTransposeCase(**geometry)
    return min(output_size(case)) > 0 and not is_too_much(case, output_size(case))


def sample(rng: random.Random) -> ConvTransposeCase:
    geometry = sample_geometry(rng)
    while not is_possible(geometry):
        geometry = sample_geometry(rng)
    packed = rng.choice(cases.FLOATS)
    input_values, weight_values = (cases.pick(rng, VALUES) for _ in range(2))
    if "huge" in (input_values, weight_values):  # infinite in fp16, and the reference has zeros to multiply with
        input_values = weight_values = "normal"
    return ConvTransposeCase(**geometry, **sample_operands(rng, packed, input_values, weight_values))


def spread_out(x: Tensor, case: ConvTransposeCase) -> Tensor:
    """With zeros between the elements and around them, so that a convolution of stride 1 gives the output."""
    fields = (case.stride, case.kernel, case.dilation, case.padding, case.output_padding)
    for i, (stride, kernel, dilation, padding, extra) in enumerate(zip(*map(numbers, fields), strict=True)):
        dim, around = 2 + i, dilation * (kernel - 1) - padding
        sizes = list(x.shape)
        sizes[dim] = (x.shape[dim] - 1) * stride + 1
        spread = torch.zeros(sizes, dtype=x.dtype)
        spread.movedim(dim, -1)[..., ::stride] = x.movedim(dim, -1)
        longer = torch.nn.functional.pad(spread.movedim(dim, -1), (max(0, around), max(0, around + extra)))
        x = torch.nn.functional.pad(longer, (min(0, around), min(0, around + extra))).movedim(-1, dim)
    return x


def as_conv(case: ConvTransposeCase, x: Tensor, weight: Tensor) -> tuple[ConvCase, Tensor, Tensor]:
    dims, spread = len(numbers(case.kernel)), spread_out(x, case)
    grouped = weight.reshape(case.groups, case.channels, case.out_channels, *weight.shape[2:])
    flipped = grouped.transpose(1, 2).flatten(0, 1).flip(list(range(2, 2 + dims)))
    conv_case = ConvCase(
        images=case.images,
        size=joined(list(spread.shape[2:])),
        channels=case.channels,
        out_channels=case.out_channels,
        groups=case.groups,
        kernel=case.kernel,
        stride=joined([1] * dims),
        dilation=case.dilation,
        padding=joined([0] * (2 * dims)),
        packed=case.packed,
        activation=case.activation,
        alpha=case.alpha,
        beta=case.beta,
        binary=case.binary,
        activation_last=case.activation_last,
        out=case.out or case.input,
    )
    return conv_case, spread, flipped


def check(case: ConvTransposeCase) -> None:
    weight_shape = (case.groups * case.channels, case.out_channels, *numbers(case.kernel))
    operands = Operands.of(case, weight_shape, output_size(case))
    x, weight = operands.input, operands.weight
    compute = DTYPES[case.packed]
    taps: dict[str, Any] = {"stride": numbers(case.stride), "dilation": numbers(case.dilation)}
    packed = ops.conv_transpose_pack(weight, case.groups, **taps, dtype=compute)
    unpacked = ops.conv_transpose_unpack(packed, weight.shape, case.groups, **taps, dtype=compute)
    expect_equal("the unpacked weight", unpacked, weight.to(compute))
    geometry = taps | {name: numbers(getattr(case, name)) for name in ("padding", "output_padding")}
    after = operands.after(case)
    got = ops.conv_transpose(x, packed, weight.shape, operands.bias, groups=case.groups, **geometry, **after)
    expected = expected_conv(*as_conv(case, x, weight), operands.bias, operands.scale, operands.other)
    in_memory = (case.images, *output_size(case), case.groups * case.out_channels)
    dtype = DTYPES[case.out or case.input]
    expect_values("the output", got.movedim(1, -1), expected, in_memory, dtype, flushes_denormals(compute))


FAMILY = Family("conv_transpose", ConvTransposeCase, sample, check)


def test_cases(case_batch: list[ConvTransposeCase]) -> None:
    FAMILY.run_all(case_batch)


INTEGERS = {"input_values": "integers", "weight_values": "integers", "out": "f32", "bias": "f32"}
GEOMETRIES = [
    {"size": "5x4", "kernel": "2x2", "stride": "2x2"},  # UNets
    {"size": "5x4", "kernel": "4x4", "stride": "2x2", "padding": "1x1"},  # generators
    {"size": "5x4", "kernel": "3x3", "stride": "2x2", "padding": "1x1", "output_padding": "1x1"},
    {"size": "3x3", "kernel": "2x2", "stride": "5x4", "output_padding": "3x3"},  # positions without taps
    {"size": "3x3", "kernel": "3x3", "stride": "4x2", "dilation": "2x2"},  # the same
    {"size": "3x3", "kernel": "4x3", "stride": "2x3", "dilation": "3x2"},
    {"size": "4x4", "kernel": "3x3", "stride": "2x2", "padding": "4x4"},  # more padding than kernel
    {"size": "1x1", "kernel": "5x5"},
    {"images": 0, "kernel": "2x2", "stride": "2x2"},
    {"size": "30", "kernel": "16", "stride": "8", "padding": "4", "dilation": "1", "output_padding": "0"},  # vocoders
    {
        **{"size": "3x4x5", "kernel": "2x2x2", "stride": "2x2x2", "dilation": "1x1x1"},
        **{"padding": "0x0x0", "output_padding": "0x1x0"},
    },
]
CHANNELS = [(1, 1, 1), (3, 64, 1), (37, 41, 1), (130, 33, 1), (1, 1, 40), (1, 2, 5), (4, 4, 32), (7, 40, 3)]


@pytest.mark.sanitize
@pytest.mark.parametrize("packed", cases.FLOATS)
def test_geometries(packed: str) -> None:
    fields = {"packed": packed, "input": packed, "weight": packed, **INTEGERS}
    FAMILY.run_all(
        ConvTransposeCase(seed=seed, channels=c, out_channels=o, groups=g, layout=layout, **geometry, **fields)  # type: ignore[arg-type]
        for seed, (geometry, (c, o, g), layout) in enumerate(
            itertools.product(GEOMETRIES, CHANNELS, ("channels_last", "channel_slice"))
        )
    )


def test_results_do_not_depend_on_the_number_of_threads(torch_threads: None) -> None:
    x, weight = last(torch.randn(3, 40, 17, 19)), torch.randn(40, 70, 3, 3)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(conv_transpose(x, weight, stride=[2, 2]))
    assert all(torch.equal(result, results[0]) for result in results[1:])
    assert torch.allclose(results[0], torch.nn.functional.conv_transpose2d(x, weight, stride=2), atol=1e-4)


# ---- Errors ---------------------------------------------------------------------------------------------------------


def conv_transpose(x: Tensor, weight: Tensor, bias: Tensor | None = None, groups: int = 1, **options: Any) -> Tensor:
    dims = weight.dim() - 2
    taps = {"stride": options.pop("stride", [1] * dims), "dilation": options.pop("dilation", [1] * dims)}
    packed = ops.conv_transpose_pack(weight, groups, **taps, dtype=weight.dtype)
    size = options.pop("weight_size", weight.shape)
    geometry = {"padding": [0] * dims, "output_padding": [0] * dims}
    result: Tensor = ops.conv_transpose(x, packed, size, bias, groups=groups, **taps, **(geometry | options))
    return result


X, W = torch.randn(2, 8, 6, 6), torch.randn(8, 12, 3, 3)
PACKED = ops.conv_transpose_pack(W, stride=[2, 2], dilation=[1, 1], dtype=torch.float32)
ERRORS: dict[str, tuple[Any, str]] = {
    "channels": (lambda: conv_transpose(X[:, 1:], W), r"input: expected 8 channels .*got shape \[2, 7, 6, 6\]"),
    "dimensions": (lambda: conv_transpose(X[0], W), r"input: expected 4 dimensions .*got shape \[8, 6, 6\]"),
    "empty": (lambda: conv_transpose(X[..., :0], W), "input: expected at least 1 element along spatial dimension 1"),
    "groups": (lambda: conv_transpose(X, W, groups=3), "groups: expected a divisor of the 8 input channels, got 3"),
    "weight": (lambda: conv_transpose(X, W[0, 0]), r"weight: expected \[in_channels, .* \[3, 3\]"),
    "padding": (lambda: conv_transpose(X, W, padding=[4, 0]), r"padding: expected numbers .*\[4, 0\].* size 0 is"),
    "negative": (lambda: conv_transpose(X, W, padding=[-1, 0]), "padding: expected numbers of at least 0"),
    "output_padding": (lambda: conv_transpose(X, W, output_padding=[1, 0]), "output_padding: expected numbers smaller"),
    "stride": (lambda: conv_transpose(X, W, stride=[0, 1]), r"stride: expected numbers of at least 1, got \[0, 1\]"),
    "dilation": (lambda: conv_transpose(X, W, dilation=[1, 0]), "dilation: expected numbers of at least 1"),
    "bias": (lambda: conv_transpose(X, W, torch.randn(11)), r"bias: expected shape \[12\], got \[11\]"),
    "other": (
        lambda: conv_transpose(X, W, binary="add", other=X),
        r"other: expected the output's shape \[2, 12, 8, 8\], got \[2, 8, 6, 6\]",
    ),
    "packed for another stride": (
        lambda: ops.conv_transpose_unpack(PACKED, W.shape, 1, [1, 1], [1, 1], torch.float32),
        r"packed: expected \d+ bytes for this weight_size, stride, dilation and these groups, got \d+",
    ),
    "packed for a convolution": (
        lambda: ops.conv_transpose_unpack(ops.conv_pack(W, dtype=torch.float32), W.shape, 1, [2, 2], [1, 1], W.dtype),
        r"packed: expected \d+ bytes",
    ),
    "truncated": (
        lambda: ops.conv_transpose_unpack(PACKED[:64], W.shape, 1, [2, 2], [1, 1], torch.float32),
        "packed: expected a weight as made by conv_transpose_pack, got other bytes",
    ),
    "not packed": (
        lambda: ops.conv_transpose_unpack(PACKED[:7], W.shape, 1, [2, 2], [1, 1], torch.float32),
        "packed: expected a packed weight, got 7 bytes",
    ),
    "dtype": (
        lambda: ops.conv_transpose_unpack(PACKED, W.shape, 1, [2, 2], [1, 1], torch.bfloat16),
        "dtype: expected float32, the packed weight's, got bfloat16",
    ),
    "gradient": (lambda: conv_transpose(X.clone().requires_grad_(), W), "input: requires a gradient"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(RuntimeError, match="xopt::conv_transpose.*" + message):
        call()


def test_a_damaged_matrix_is_found() -> None:
    damaged = PACKED.clone()
    second = next(i for i in range(64, len(damaged), 64) if bytes(damaged[i : i + 8].tolist()) == b"xoptpack")
    damaged[second + 24] += 1
    with pytest.raises(RuntimeError, match="of its matrix 1 its header is corrupted"):
        ops.conv_transpose_unpack(damaged, W.shape, 1, [2, 2], [1, 1], torch.float32)


def test_reference_agrees_with_torch() -> None:
    for seed in range(40):
        case = sample(random.Random(seed))
        dims = len(numbers(case.kernel))
        x = torch.randn(case.images, case.groups * case.channels, *numbers(case.size)).double()
        weight = torch.randn(case.groups * case.channels, case.out_channels, *numbers(case.kernel)).double()
        function: Any = getattr(torch.nn.functional, f"conv_transpose{dims}d")
        names = ("stride", "padding", "output_padding", "dilation")
        geometry = {name: numbers(getattr(case, name)) for name in names}
        if all(extra < step for extra, step in zip(geometry["output_padding"], geometry["stride"], strict=True)):
            expected = function(x, weight, groups=case.groups, **geometry)
            _, spread, flipped = as_conv(case, x, weight)
            conv: Any = getattr(torch.nn.functional, f"conv{dims}d")
            got = conv(spread, flipped, groups=case.groups, dilation=geometry["dilation"])
            assert torch.allclose(got, expected)
