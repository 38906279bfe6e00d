"""Short convolutions along time that see no later step (Mamba, Qwen3-Next, LFM2), on xopt's kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.modules.chain import Call, Seen, Shape, Value, chainable
from xopt.modules.fixed_dtype import takes_fixed_floats
from xopt.modules.gradients import wants_gradient
from xopt.modules.pattern import step
from xopt.modules.substitute import are_floats_on_cpu

_causal_conv = torch.ops.xopt.causal_conv.default


@step("causal convolution")
def causal_conv(
    input: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """[batch, steps, channels] of the input, [channels, taps] of the weight, and [batch, channels, steps] of the state,
    which has what came before and comes back with what was last. The options are those of `convolve_with_torch`."""
    tensors = (input, weight, bias, state)
    run = _causal_conv if are_floats_on_cpu(*tensors) and not wants_gradient(*tensors) else convolve_with_torch
    return run(*tensors, **options)


def convolve_with_torch(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None, *, silu: bool = False
) -> tuple[Tensor, Tensor]:
    channels, taps = weight.shape
    values = input.transpose(1, 2).float()
    if state is None:
        last = values.new_empty(*values.shape[:2], 0, dtype=input.dtype)
        values = functional.pad(values, (taps - 1, 0))
    else:
        values = torch.cat([state.float(), values], dim=-1)
        last = values[..., values.shape[-1] - state.shape[-1] :].to(state.dtype, copy=True)
        values = values[..., state.shape[-1] - (taps - 1) :]
    bias = None if bias is None else bias.float()
    out = functional.conv1d(values, weight.float().unsqueeze(1), bias, groups=channels)
    out = functional.silu(out) if silu else out
    return out.transpose(1, 2).to(input.dtype), last


@chainable(causal_conv, where=takes_fixed_floats, has_parts=True)
def _causal_conv_call(
    seen: Seen, input: Value, weight: Value, bias: Value | None, state: Value | None, *, silu: bool = False
) -> Call:
    # A state that there is tells its own size.
    def shape(input: Shape, weight: Shape, *state: Shape) -> Shape:
        return input

    def second(input: Shape, weight: Shape, *state: Shape) -> Shape:
        return state[0] if state else (input[0], input[2], 0)

    def fits(input: Shape, weight: Shape, *state: Shape) -> bool:
        return len(input) == 3 and len(weight) == 2

    others = (weight,) if state is None else (weight, state)
    arguments = (input, weight, bias, state, silu, None)
    return Call("causal_conv", arguments, input, shape, others=others, second=second, fits=fits)
