"""Fakes of the norms over rows."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of, rows_of
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of


def _outputs(
    op: str, input: Tensor, residual: Tensor | None, return_sum: bool, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    if input.dim() < 1:
        raise RuntimeError(f"xopt::{op}: input: expected at least one dimension, got 0")
    if residual is not None and residual.shape != input.shape:
        raise RuntimeError(f"xopt::{op}: residual: expected the input's shape {input.shape}, got {residual.shape}")
    total = input.new_empty(input.shape if return_sum else (0,))
    return input.new_empty(input.shape, dtype=out_dtype or input.dtype), total


@fake_of("layer_norm")
def _layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    return_sum: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    check("layer_norm", {"input": input, "weight": weight, "bias": bias, "residual": residual}, FLOATING)
    return _outputs("layer_norm", input, residual, return_sum, out_dtype)


@fake_of("rms_norm")
def _rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    return_sum: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    check("rms_norm", {"input": input, "weight": weight, "residual": residual}, FLOATING)
    return _outputs("rms_norm", input, residual, return_sum, out_dtype)


@fake_of("unit_norm")
def _unit_norm(input: Tensor, *, eps: float = 1e-12, out_dtype: torch.dtype | None = None) -> Tensor:
    check("unit_norm", {"input": input}, FLOATING)
    return _outputs("unit_norm", input, None, False, out_dtype)[0]


@cost_of("layer_norm", category="norm", kernel="norm")
@cost_of("rms_norm", category="norm", kernel="norm")
@cost_of("unit_norm", category="norm", kernel="norm")
def _norm_work(input: Shape, *others: object, **options: object) -> Work:
    return Work(f"{rows_of(input)}x{input[-1]}")
