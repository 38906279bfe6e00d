"""Fakes of the linear family: packing and unpacking of weights, and products with them."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of, product, rows_of
from xopt.ops.fakes import FLOATING, Size, Tensor, ceil_div, check, fake_of

_HEADER_BYTES = 64
_TILE_BYTES = 1024
_COLUMN_BYTES = 12  # of an int8 weight: scale, column sum and zero point


def check_packed(op: str, packed: Tensor) -> None:
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise RuntimeError(
            f"xopt::{op}: packed: expected a uint8 tensor of one dimension, got {packed.dtype} of {packed.dim()}"
        )


def packed_output(op: str, input: Tensor, packed: Tensor, out_features: Size, dtype: torch.dtype) -> Tensor:
    check_packed(op, packed)
    if input.dim() < 1:
        raise RuntimeError(f"xopt::{op}: input: expected at least one dimension, got 0")
    return input.new_empty((*input.shape[:-1], out_features), dtype=dtype)


def packed_bytes(like: Tensor, out_features: Size, in_features: Size, dtype: torch.dtype, gated: bool) -> Tensor:
    return like.new_empty((layout_bytes(out_features, in_features, dtype.itemsize, gated),), dtype=torch.uint8)


def layout_bytes(out_features: Size, in_features: Size, itemsize: int, gated: bool) -> Size:
    """The size of csrc/kernels/packed.h's layout."""
    panels = ceil_div(out_features, 16 if gated else 32)
    panel_bytes = ceil_div(in_features * itemsize, 64) * 2 * _TILE_BYTES
    if itemsize == torch.int8.itemsize:
        panel_bytes += 32 * _COLUMN_BYTES
    return _HEADER_BYTES + panels * panel_bytes


def fitting_itemsizes(packed: Shape, out_features: int, in_features: int, gated: bool = False) -> tuple[int, ...]:
    """Of which size a packed weight's elements can be; none: it is a part of a larger one."""
    sizes = (torch.float32.itemsize, torch.bfloat16.itemsize, torch.int8.itemsize)
    return tuple(size for size in sizes if layout_bytes(out_features, in_features, size, gated) == packed[0])


def _matrix_sizes(op: str, name: str, weight: Tensor) -> tuple[Size, Size]:
    if weight.dim() != 2:
        raise RuntimeError(
            f"xopt::{op}: {name}: expected two dimensions [out_features, in_features], got {weight.dim()}"
        )
    return weight.shape[0], weight.shape[1]


# ---- Packing -------------------------------------------------------------------------------------------------------


@fake_of("linear_pack")
def _linear_pack(weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    out_features, in_features = _matrix_sizes("linear_pack", "weight", weight)
    return packed_bytes(weight, out_features, in_features, dtype, gated=False)


@fake_of("linear_pack_gated")
def _linear_pack_gated(gate: Tensor, up: Tensor, *, dtype: torch.dtype) -> Tensor:
    out_features, in_features = _matrix_sizes("linear_pack_gated", "gate", gate)
    return packed_bytes(gate, out_features, in_features, dtype, gated=True)


@fake_of("linear_pack_int8")
def _linear_pack_int8(weight: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    out_features, in_features = _matrix_sizes("linear_pack_int8", "weight", weight)
    return packed_bytes(weight, out_features, in_features, torch.int8, gated=False)


@fake_of("linear_unpack")
def _linear_unpack(packed: Tensor, out_features: Size, in_features: Size, dtype: torch.dtype) -> Tensor:
    check_packed("linear_unpack", packed)
    return packed.new_empty((out_features, in_features), dtype=dtype)


@fake_of("linear_unpack_gated")
def _linear_unpack_gated(
    packed: Tensor, out_features: Size, in_features: Size, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    check_packed("linear_unpack_gated", packed)
    shape = (out_features, in_features)
    return packed.new_empty(shape, dtype=dtype), packed.new_empty(shape, dtype=dtype)


@fake_of("linear_unpack_int8")
def _linear_unpack_int8(packed: Tensor, out_features: Size, in_features: Size) -> tuple[Tensor, Tensor, Tensor]:
    check_packed("linear_unpack_int8", packed)
    return (
        packed.new_empty((out_features, in_features), dtype=torch.int8),
        packed.new_empty((out_features,), dtype=torch.float32),
        packed.new_empty((out_features,), dtype=torch.int32),
    )


# ---- Linear --------------------------------------------------------------------------------------------------------


@fake_of("linear")
def _linear(
    input: Tensor,
    packed: Tensor,
    out_features: Size,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    alpha: float = 0.0,
    beta: float = 0.0,
    binary: str = "none",
    other: Tensor | None = None,
    activation_last: bool = False,
    out_dtype: torch.dtype | None = None,
    output_scale: float = 1.0,
    output_zero_point: int = 0,
    first_column: int = 0,
    scale: Tensor | None = None,
) -> Tensor:
    named = {"input": input, "packed": packed, "bias": bias, "other": other, "scale": scale}
    check("linear", named, FLOATING)
    return packed_output("linear", input, packed, out_features, out_dtype or input.dtype)


@fake_of("linear_gated")
def _linear_gated(
    input: Tensor,
    packed: Tensor,
    out_features: Size,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 0.0,
    beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    named = {"input": input, "packed": packed, "gate_bias": gate_bias, "up_bias": up_bias}
    check("linear_gated", named, FLOATING)
    return packed_output("linear_gated", input, packed, out_features, out_dtype or input.dtype)


@fake_of("linear_norm")
def _linear_norm(
    input: Tensor,
    packed: Tensor,
    out_features: Size,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: str = "layer_norm",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    return_sum: bool = False,
) -> tuple[Tensor, Tensor]:
    named = {"input": input, "packed": packed, "bias": bias, "residual": residual}
    check("linear_norm", named | {"norm_weight": norm_weight, "norm_bias": norm_bias}, FLOATING)
    out = packed_output("linear_norm", input, packed, out_features, out_dtype or input.dtype)
    return out, torch.empty_like(out) if return_sum else out.new_empty((0,))


@fake_of("qlinear")
def _qlinear(
    input: Tensor,
    input_scale: Tensor,
    input_zero_point: Tensor | None,
    packed: Tensor,
    out_features: Size,
    bias: Tensor | None = None,
    *,
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
    check("qlinear", named | {"bias": bias, "other": other}, (torch.uint8, torch.int8))
    return packed_output("qlinear", input, packed, out_features, out_dtype)


# ---- Costs ---------------------------------------------------------------------------------------------------------


@cost_of("linear", category="gemm", kernel="gemm")
@cost_of("linear_norm", category="gemm", kernel="gemm")
def _linear_work(input: Shape, packed: Shape, out_features: int, *others: object, **options: object) -> Work:
    itemsizes = fitting_itemsizes(packed, out_features, input[-1])
    return product(rows_of(input), out_features, input[-1], itemsizes=itemsizes)


@cost_of("linear_gated", category="gemm", kernel="gemm")
def _linear_gated_work(input: Shape, packed: Shape, out_features: int, *others: object, **options: object) -> Work:
    itemsizes = fitting_itemsizes(packed, out_features, input[-1], gated=True)
    return product(rows_of(input), out_features, input[-1], count=2, itemsizes=itemsizes)


@cost_of("qlinear", category="gemm", kernel="gemm")
def _qlinear_work(
    input: Shape,
    input_scale: Shape,
    input_zero_point: Shape | None,
    packed: Shape,
    out_features: int,
    *others: object,
    **options: object,
) -> Work:
    return product(rows_of(input), out_features, input[-1])
