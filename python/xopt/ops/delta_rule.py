"""The fake of the gated delta rule."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of


@fake_of("delta_rule")
def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    state: Tensor | None = None,
    *,
    scale: float | None = None,
    unit_eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    named = {"query": query, "key": key, "value": value, "decay": decay, "rate": rate, "state": state}
    check("delta_rule", named, FLOATING)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise RuntimeError(f"xopt::delta_rule: {name}: expected [batch, steps, heads, depth], got {tensor.dim()}")
    batch, _, heads, depth = value.shape
    return value.new_empty(value.shape), value.new_empty((batch, heads, query.shape[3], depth), dtype=torch.float32)


@cost_of("delta_rule", category="attention", kernel="delta_rule")
def _delta_rule_work(query: Shape, key: Shape, value: Shape, *others: object, **options: object) -> Work:
    """The recurrence: what it reads for a key and for a query, and what it writes."""
    batch, steps, heads, depth = value
    return Work(f"{batch}x{steps}x{heads}x{query[3]}x{depth}", 6 * batch * steps * heads * query[3] * depth)
