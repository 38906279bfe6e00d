"""Fake of matmul, and what it costs."""

from __future__ import annotations

import math

import torch

from xopt.ops.costs import Shape, Work, cost_of, product
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of


@fake_of("matmul")
def _matmul(
    left: Tensor,
    right: Tensor,
    other: Tensor | None = None,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    check("matmul", {"left": left, "right": right, "other": other}, FLOATING)
    for name, tensor in (("left", left), ("right", right)):
        if tensor.dim() < 2:
            raise RuntimeError(f"xopt::matmul: {name}: expected at least two dimensions, got {tensor.dim()}")
    leading = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    return left.new_empty((*leading, left.shape[-2], right.shape[-1]), dtype=out_dtype or left.dtype)


@cost_of("matmul", category="gemm", kernel="matmul")
def _matmul_work(left: Shape, right: Shape, other: Shape | None = None, **options: object) -> Work:
    pairs = math.prod(torch.broadcast_shapes(left[:-2], right[:-2]))  # type: ignore[no-untyped-call]
    return product(left[-2], right[-1], left[-1], count=pairs)
