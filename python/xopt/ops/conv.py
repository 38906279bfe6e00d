"""Fakes of convolutions and the packing of their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Size, Tensor, ceil_div, check, empty_image, fake_of
from xopt.ops.linear import check_packed, fitting_itemsizes, packed_bytes

_PANEL = 32


def matrix_of(op: str, name: str, sizes: Sequence[Size], groups: int) -> tuple[Size, Size]:
    """Rows and columns of the packed matrix: csrc/ops/conv_layout.h."""
    if not 3 <= len(sizes) <= 5:
        raise RuntimeError(
            f"xopt::{op}: {name}: expected [out_channels, in_channels / groups, kernel...] with 1 to 3 sizes of the"
            f" kernel, got {list(sizes)}"
        )
    out, group_in = sizes[0], sizes[1]
    positions: Size = 1
    for size in sizes[2:]:
        positions = positions * size
    if groups < 1 or out % groups != 0:
        raise RuntimeError(f"xopt::{op}: groups: expected a divisor of the {out} output channels, got {groups}")
    if group_in == 1 and out == groups:
        return out, positions
    group_out = out // groups
    if group_out == 0:
        return 0, positions * group_in
    columns = ceil_div(group_out, _PANEL) * _PANEL
    merged = min(groups, columns // group_out)
    products = ceil_div(groups, merged)
    if merged * group_out < columns and groups // products * products == groups:
        merged = groups // products
    padded = ceil_div(merged * group_out, _PANEL) * _PANEL
    rest = groups - groups // merged * merged
    last = rest if rest > 0 else merged
    return (ceil_div(groups, merged) - 1) * padded + last * group_out, positions * merged * group_in


def output_sizes(
    sizes: Sequence[Size],
    kernel: Sequence[Size],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Size]:
    """Of the spatial dimensions. `padding`: before and after each."""
    return [
        (size + before + after - step * (taps - 1) - 1) // stride_of + 1
        for size, taps, stride_of, before, after, step in zip(
            sizes, kernel, stride, padding[::2], padding[1::2], dilation, strict=True
        )
    ]


def image_output(
    op: str,
    input: Tensor,
    packed: Tensor,
    weight_size: Sequence[Size],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    dtype: torch.dtype,
) -> Tensor:
    """What a convolution returns, with its channels last in memory."""
    check_packed(op, packed)
    matrix_of(op, "weight_size", weight_size, groups)
    if input.dim() != len(weight_size):
        raise RuntimeError(
            f"xopt::{op}: input: expected {len(weight_size)} dimensions [images, channels, spatial...] for this"
            f" weight, got shape {list(input.shape)}"
        )
    spatial = output_sizes(input.shape[2:], weight_size[2:], stride, padding, dilation)
    return empty_image(input, weight_size[0], spatial, dtype)


def conv_work(
    input: Shape,
    packed: Shape,
    weight_size: Shape,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Work:
    out = output_sizes(input[2:], weight_size[2:], stride, padding, dilation)
    size = f"{joined(input)}, {joined(weight_size[2:])}/{joined(stride)} to {weight_size[0]}"
    depthwise = weight_size[1] == 1 and weight_size[0] == input[1]
    flop = int(2 * input[0] * math.prod(out) * math.prod(weight_size))
    columns, terms = matrix_of("conv", "weight_size", weight_size, groups)
    itemsizes = fitting_itemsizes(packed, int(columns), int(terms))
    return Work(size, flop, kernel="conv_depthwise" if depthwise else "", itemsizes=itemsizes)


@fake_of("conv_pack")
def _conv_pack(weight: Tensor, groups: int = 1, *, dtype: torch.dtype) -> Tensor:
    return packed_bytes(weight, *matrix_of("conv_pack", "weight", weight.shape, groups), dtype, gated=False)


@fake_of("conv_unpack")
def _conv_unpack(packed: Tensor, weight_size: Sequence[Size], groups: int, dtype: torch.dtype) -> Tensor:
    check_packed("conv_unpack", packed)
    return packed.new_empty(tuple(weight_size), dtype=dtype)


@fake_of("conv")
def _conv(
    input: Tensor,
    packed: Tensor,
    weight_size: Sequence[Size],
    bias: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
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
    check("conv", named, FLOATING)
    return image_output("conv", input, packed, weight_size, stride, padding, dilation, groups, out_dtype or input.dtype)


@cost_of("conv", category="conv", kernel="conv")
def _conv_work(
    input: Shape,
    packed: Shape,
    weight_size: Shape,
    bias: Shape | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    **options: object,
) -> Work:
    return conv_work(input, packed, weight_size, stride, padding, dilation, groups)
