"""Fakes of products with weights of 8 and 4 bits."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of, product, rows_of
from xopt.ops.fakes import FLOATING, Size, Tensor, ceil_div, check, fake_of
from xopt.ops.linear import packed_output

_HEADER_BYTES = 64
_TILE_K = 32


@fake_of("linear_pack_weight_only")
def _linear_pack_weight_only(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    bits: int,
    group_size: Size,
    gated: bool = False,
) -> Tensor:
    if weight.dim() != 2:
        raise RuntimeError(
            "xopt::linear_pack_weight_only: weight: expected two dimensions [out_features, in_features],"
            f" got {weight.dim()}"
        )
    rows, k = weight.shape
    panels = ceil_div(rows // 2, 16) if gated else ceil_div(rows, 32)
    codes = ceil_div(k, _TILE_K) * _TILE_K * 32 * bits // 8
    scale_bytes = 4 if zero_point is None else 5
    bytes_of_panel = codes + scale.shape[1] * 32 * scale_bytes
    return weight.new_empty((_HEADER_BYTES + panels * bytes_of_panel,), dtype=torch.uint8)


@fake_of("linear_weight_only")
def _linear_weight_only(
    input: Tensor,
    packed: Tensor,
    out_features: Size,
    bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: str = "none",
    alpha: float = 0.0,
    beta: float = 0.0,
    binary: str = "none",
    other: Tensor | None = None,
    activation_last: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    named = {"input": input, "packed": packed, "bias": bias, "up_bias": up_bias, "other": other}
    check("linear_weight_only", named, FLOATING)
    return packed_output("linear_weight_only", input, packed, out_features, out_dtype or input.dtype)


@cost_of("linear_weight_only", category="gemm", kernel="gemm")
def _linear_weight_only_work(
    input: Shape, packed: Shape, out_features: int, *others: object, gated: bool = False, **options: object
) -> Work:
    return product(rows_of(input), out_features, input[-1], count=2 if gated else 1)
