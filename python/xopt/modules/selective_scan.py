"""The scan of a state space whose states decay each by themselves (Mamba), on xopt's kernel."""

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

_selective_scan = torch.ops.xopt.selective_scan.default


@step("selective scan")
def selective_scan(
    input: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """[batch, steps, channels] of input, dt and gate, [batch, steps, states] of b and c, [channels, states] of a, and
    [batch, channels, states] of the state. The options are those of `scan_states_with_torch`."""
    tensors = (input, dt, a, b, c, skip, gate, dt_bias, state)
    known = are_floats_on_cpu(*tensors) and not wants_gradient(*tensors)
    run = _selective_scan if known else scan_states_with_torch
    return run(*tensors, **options)


def scan_states_with_torch(
    input: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    softplus: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The same step by step."""
    values, dt = input.float(), dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = functional.softplus(dt) if softplus else dt
    batch, steps, channels = input.shape
    now = values.new_zeros(batch, channels, a.shape[1]) if state is None else state.float()
    outputs = []
    for i in range(steps):
        step_size = dt[:, i, :, None]
        now = torch.exp(step_size * a.float()) * now + step_size * values[:, i, :, None] * b[:, i, None].float()
        outputs.append((now * c[:, i, None].float()).sum(-1))
    out = torch.stack(outputs, 1) if outputs else values
    out = out if skip is None else out + values * skip.float()
    out = out if gate is None else out * functional.silu(gate.float())
    return out.to(out_dtype or input.dtype), now


@chainable(selective_scan, where=takes_fixed_floats, has_parts=True)
def _selective_scan_call(
    seen: Seen,
    input: Value,
    dt: Value,
    a: Value,
    *others: Value | None,
    softplus: bool,
    out_dtype: torch.dtype,
) -> Call:
    def shape(input: Shape, a: Shape) -> Shape:
        return input

    def second(input: Shape, a: Shape) -> Shape:
        return (input[0], *a)

    def fits(input: Shape, a: Shape) -> bool:
        return len(input) == 3 and len(a) == 2

    arguments = (input, dt, a, *others, softplus, out_dtype)
    return Call("selective_scan", arguments, input, shape, others=(a,), second=second, fits=fits)
