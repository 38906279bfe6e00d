"""Fakes and costs of transposed convolutions and the packing of their weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from xopt.ops.conv import matrix_of
from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Size, Tensor, check, empty_image, fake_of
from xopt.ops.linear import check_packed, layout_bytes


def _bytes(
    op: str, sizes: Sequence[int], groups: int, stride: Sequence[int], dilation: Sequence[int], itemsize: int
) -> Size:
    """Of all phases: csrc/ops/conv_phases.h."""
    if groups < 1 or sizes[0] % groups != 0:
        raise RuntimeError(f"xopt::{op}: groups: expected a divisor of the {sizes[0]} input channels, got {groups}")
    along = []
    for kernel, step, spread in zip(sizes[2:], stride, dilation, strict=True):
        apart = step // math.gcd(step, spread)
        along.append([(kernel - 1 - first) // apart + 1 for first in range(min(kernel, apart))])
    total: Size = 0
    for taps in itertools.product(*along):
        matrix = matrix_of(op, "weight", (sizes[1] * groups, sizes[0] // groups, *taps), groups)
        total += layout_bytes(*matrix, itemsize, gated=False)
    return total


def output_sizes(
    sizes: Sequence[Size],
    kernel: Sequence[Size],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Size]:
    """Of the spatial dimensions."""
    return [
        (size - 1) * step - 2 * before + spread * (taps - 1) + extra + 1
        for size, taps, step, before, extra, spread in zip(
            sizes, kernel, stride, padding, output_padding, dilation, strict=True
        )
    ]


@fake_of("conv_transpose_pack")
def _conv_transpose_pack(
    weight: Tensor, groups: int = 1, *, stride: Sequence[int], dilation: Sequence[int], dtype: torch.dtype
) -> Tensor:
    total = _bytes("conv_transpose_pack", weight.shape, groups, stride, dilation, dtype.itemsize)
    return weight.new_empty((total,), dtype=torch.uint8)


@fake_of("conv_transpose_unpack")
def _conv_transpose_unpack(
    packed: Tensor,
    weight_size: Sequence[Size],
    groups: int,
    stride: Sequence[int],
    dilation: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    check_packed("conv_transpose_unpack", packed)
    return packed.new_empty(tuple(weight_size), dtype=dtype)


@fake_of("conv_transpose")
def _conv_transpose(
    input: Tensor,
    packed: Tensor,
    weight_size: Sequence[Size],
    bias: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    scale: Tensor | None = None,
    activation: str = "none",
    alpha: float = 0.0,
    beta: float = 0.0,
    binary: str = "none",
    other: Tensor | None = None,
    activation_last: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    named = {"input": input, "packed": packed, "bias": bias, "scale": scale, "other": other}
    check("conv_transpose", named, FLOATING)
    check_packed("conv_transpose", packed)
    if input.dim() != len(weight_size):
        raise RuntimeError(
            f"xopt::conv_transpose: input: expected {len(weight_size)} dimensions [images, channels, spatial...] for"
            f" this weight, got shape {list(input.shape)}"
        )
    spatial = output_sizes(input.shape[2:], weight_size[2:], stride, padding, output_padding, dilation)
    return empty_image(input, weight_size[1] * groups, spatial, out_dtype)


@cost_of("conv_transpose", category="conv", kernel="conv")
def _conv_transpose_work(
    input: Shape,
    packed: Shape,
    weight_size: Shape,
    bias: Shape | None = None,
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    **options: object,
) -> Work:
    fitting = [
        itemsize
        for itemsize in (torch.float32.itemsize, torch.bfloat16.itemsize)
        if _bytes("conv_transpose", weight_size, groups, stride, dilation, itemsize) == packed[0]
    ]
    size = f"{joined(input)}, {joined(weight_size[2:])}/{joined(stride)} to {weight_size[1] * groups}"
    return Work(size, 2 * input[0] * math.prod(input[2:]) * math.prod(weight_size), itemsizes=tuple(fitting))
