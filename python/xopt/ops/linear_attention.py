"""The fake of linear attention."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of


@fake_of("linear_attention")
def _linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    state: Tensor | None = None,
    *,
    scale: float | None = None,
    unit_eps: float | None = None,
    corrects: bool = True,
    state_by_columns: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    named = {"query": query, "key": key, "value": value, "decay": decay, "rate": rate, "state": state}
    check("linear_attention", named, FLOATING)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise RuntimeError(
                f"xopt::linear_attention: {name}: expected [batch, steps, heads, depth], got {tensor.dim()}"
            )
    batch, _, heads, columns = value.shape
    last = (columns, query.shape[3]) if state_by_columns else (query.shape[3], columns)
    out = value.new_empty(value.shape, dtype=out_dtype or value.dtype)
    return out, value.new_empty((batch, heads, *last), dtype=torch.float32)


@cost_of("linear_attention", category="attention", kernel="linear_attention")
def _linear_attention_work(
    query: Shape, key: Shape, value: Shape, *others: object, corrects: bool = True, **options: object
) -> Work:
    """The recurrence: what it reads for a query and, to correct it, for a key, and what it writes."""
    batch, steps, heads, depth = value
    flops = (6 if corrects else 4) * batch * steps * heads * query[3] * depth
    return Work(f"{batch}x{steps}x{heads}x{query[3]}x{depth}", flops)
