"""Linear attention on xopt's kernel: the gated delta rule, and states that decay (Mamba 2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from xopt import ops  # noqa: F401 - loads them
from xopt.modules.chain import Call, Seen, Shape, Value, chainable
from xopt.modules.fixed_dtype import takes_fixed_floats
from xopt.modules.gradients import wants_gradient
from xopt.modules.pattern import dtype_of, step
from xopt.modules.substitute import are_floats_on_cpu

_linear_attention = torch.ops.xopt.linear_attention.default


def can_scan(query: Tensor, key: Tensor, value: Tensor, *numbers: Tensor | None) -> bool:
    """Whether the kernel takes these tensors, beside decay, rate and state."""
    if not are_floats_on_cpu(query, key, value, *numbers):
        return False
    if not query.ndim == key.ndim == value.ndim == 4 or not query.dtype == key.dtype == value.dtype:
        return False
    return query.shape[2] > 0 and value.shape[2] % query.shape[2] == 0


@step("linear attention")
def gated_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """[batch, steps, heads, depth] of all three, and of the result; decay and rate as [batch, steps, heads], the decay
    maybe with a last dimension for the rows of the state, which is [batch, heads, depth, value depth], or, where
    `state_by_columns`, [batch, heads, value depth, depth]. The options are those of `scan_with_torch`."""
    tensors = (query, key, value, decay, rate, state)
    run = _linear_attention if can_scan(*tensors) and not wants_gradient(*tensors) else scan_with_torch
    return run(*tensors, **options)


def scan_with_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    state: Tensor | None,
    *,
    scale: float | None = None,
    unit_eps: float | None = None,
    corrects: bool = True,
    state_by_columns: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The same step by step."""
    dtype, group = out_dtype or query.dtype, value.shape[2] // max(1, query.shape[2])
    query, key = (each.float().repeat_interleave(group, 2) for each in (query, key))
    value, decay, rate = value.float(), decay.float().exp(), rate.float().unsqueeze(-1)
    if unit_eps is not None:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + unit_eps) for x in (query, key))
    query = query * (1.0 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale)
    decay = decay.unsqueeze(-1) if decay.ndim == 4 else decay[..., None, None]
    batch, steps, heads, depth = value.shape
    if state is None:
        now = value.new_zeros(batch, heads, query.shape[-1], depth)
    else:
        now = (state.mT if state_by_columns else state).float()
    outputs = []
    for i in range(steps):
        now = now * decay[:, i]
        read = (now * key[:, i].unsqueeze(-1)).sum(-2) if corrects else 0.0
        now = now + key[:, i].unsqueeze(-1) * ((value[:, i] - read) * rate[:, i]).unsqueeze(-2)
        outputs.append((now * query[:, i].unsqueeze(-1)).sum(-2))
    last = now.mT.contiguous() if state_by_columns else now
    return (torch.stack(outputs, 1) if outputs else value).to(dtype), last


def _is_plain(node: Node) -> bool:
    return takes_fixed_floats(node) and len({dtype_of(each) for each in node.args[:3]}) == 1


@chainable(gated_linear_attention, where=_is_plain, has_parts=True)
def _linear_attention_call(
    seen: Seen,
    query: Value,
    key: Value,
    value: Value,
    decay: Value,
    rate: Value,
    state: Value | None,
    *,
    scale: float | None = None,
    unit_eps: float | None = None,
    corrects: bool = True,
    state_by_columns: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Call:
    def shape(value: Shape, query: Shape) -> Shape:
        return value

    def second(value: Shape, query: Shape) -> Shape:
        last = (value[3], query[3]) if state_by_columns else (query[3], value[3])
        return (value[0], value[2], *last)

    def fits(value: Shape, query: Shape) -> bool:
        return len(value) == len(query) == 4 and query[2] > 0 and value[2] % query[2] == 0

    options = (scale, unit_eps, corrects, state_by_columns, out_dtype)
    arguments = (query, key, value, decay, rate, state, *options)
    return Call("linear_attention", arguments, value, shape, others=(query,), second=second, fits=fits)
