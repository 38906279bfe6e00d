"""The fake of rotary."""

from __future__ import annotations

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of


@fake_of("rotary")
def _rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    check("rotary", {"query": query, "key": key, "cos": cos, "sin": sin}, FLOATING)
    for name, tensor, dims in (("query", query, 4), ("key", key, 4), ("cos", cos, 3), ("sin", sin, 3)):
        if tensor.dim() != dims:
            raise RuntimeError(f"xopt::rotary: {name}: expected {dims} dimensions, got {tensor.dim()}")
    return query.new_empty(query.shape), key.new_empty(key.shape)


@cost_of("rotary", category="pointwise", kernel="rotary")
def _rotary_work(query: Shape, key: Shape, *others: object, **options: object) -> Work:
    return Work(f"{joined(query)} and {joined(key)}")
