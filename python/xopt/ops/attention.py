"""The fake of attention."""

from __future__ import annotations

from xopt.ops.costs import Shape, Work, cost_of
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of


@fake_of("attention")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    window: int = 0,
    one_sees_all: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    check("attention", {"query": query, "key": key, "value": value, "mask": mask, "sinks": sinks}, FLOATING)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise RuntimeError(
                f"xopt::attention: {name}: expected four dimensions [batch, heads, rows, depth], got {tensor.dim()}"
            )
    batch, heads, queries, _ = query.shape
    return query.new_empty((batch, queries, heads, value.shape[3]))


@cost_of("attention", category="attention", kernel="attention")
def _attention_work(query: Shape, key: Shape, value: Shape, *others: object, **options: object) -> Work:
    """Also where a mask is causal: as flop_counter does."""
    batch, heads, queries, depth = query
    keys = key[2]
    products = 2 * batch * heads * queries * keys * (depth + value[3])
    return Work(f"{batch}x{heads}x{queries}x{keys}x{depth}", products)
