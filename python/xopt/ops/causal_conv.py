"""The fake of a causal convolution."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of


@fake_of("causal_conv")
def _causal_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    check("causal_conv", {"input": input, "weight": weight, "bias": bias, "state": state}, FLOATING)
    if input.dim() != 3:
        raise RuntimeError(f"xopt::causal_conv: input: expected [batch, steps, channels], got {input.dim()} dims")
    if weight.dim() != 2:
        raise RuntimeError(f"xopt::causal_conv: weight: expected [channels, taps], got {weight.dim()} dims")
    out = input.new_empty(input.shape, dtype=out_dtype or input.dtype)
    batch, _, channels = input.shape
    if state is None:
        return out, input.new_empty((batch, channels, 0))
    kept = state.shape[2]
    by_steps = not state.is_contiguous() and state.stride(1) == 1 and state.stride(2) == channels
    if by_steps and (batch == 1 or state.stride(0) == kept * channels):
        return out, state.new_empty((batch, kept, channels)).transpose(1, 2)
    return out, state.new_empty((batch, channels, kept))


@cost_of("causal_conv", category="conv", kernel="causal_conv")
def _causal_conv_work(input: Shape, weight: Shape, *others: object, **options: object) -> Work:
    batch, steps, channels = input
    return Work(f"{joined(input)} x {weight[1]}", 2 * batch * steps * channels * weight[1])
