"""Fakes of int8 convolutions and the packing of their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xopt.ops.conv import conv_work, image_output, matrix_of
from xopt.ops.costs import Shape, Work, cost_of
from xopt.ops.fakes import Size, Tensor, check, fake_of
from xopt.ops.linear import check_packed, packed_bytes


@fake_of("conv_pack_int8")
def _conv_pack_int8(weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, groups: int = 1) -> Tensor:
    return packed_bytes(weight, *matrix_of("conv_pack_int8", "weight", weight.shape, groups), torch.int8, gated=False)


@fake_of("conv_unpack_int8")
def _conv_unpack_int8(packed: Tensor, weight_size: Sequence[Size], groups: int) -> tuple[Tensor, Tensor, Tensor]:
    check_packed("conv_unpack_int8", packed)
    return (
        packed.new_empty(tuple(weight_size), dtype=torch.int8),
        packed.new_empty((weight_size[0],), dtype=torch.float32),
        packed.new_empty((weight_size[0],), dtype=torch.int32),
    )


@fake_of("qconv")
def _qconv(
    input: Tensor,
    input_scale: Tensor,
    input_zero_point: Tensor | None,
    packed: Tensor,
    weight_size: Sequence[Size],
    bias: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    activation: str = "none",
    alpha: float = 0.0,
    beta: float = 0.0,
    binary: str = "none",
    other: Tensor | None = None,
    activation_last: bool = False,
    out_dtype: torch.dtype = torch.float32,
    output_scale: float = 1.0,
    output_zero_point: int = 0,
) -> Tensor:
    named = {"input": input, "input_scale": input_scale, "input_zero_point": input_zero_point, "packed": packed}
    check("qconv", named | {"bias": bias, "other": other}, (torch.uint8, torch.int8))
    return image_output("qconv", input, packed, weight_size, stride, padding, dilation, groups, out_dtype)


@cost_of("qconv", category="conv", kernel="conv")
def _qconv_work(
    input: Shape,
    input_scale: Shape,
    input_zero_point: Shape | None,
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
