"""Scaled dot product attention on xopt's kernel, wherever a recorded forward calls torch's."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.autocast import autocast_dtype
from xopt.modules.base import has_kernels
from xopt.modules.pattern import Pattern, argument, calls, dtype_of, replace, shape_of, step
from xopt.modules.substitute import in_place_of
from xopt.ops.fakes import FLOATING

_attention = torch.ops.xopt.attention.default


def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel takes these tensors."""
    dtype = query.dtype
    if query.ndim != 4 or dtype not in FLOATING or key.dtype != dtype or value.dtype != dtype:
        return False
    if not has_kernels(query.device) or key.shape[0] != query.shape[0] or key.shape[:3] != value.shape[:3]:
        return False
    if torch.is_grad_enabled():
        wanted = query.requires_grad or key.requires_grad or value.requires_grad
        if wanted or (mask is not None and mask.requires_grad):
            return False
    return mask is None or (mask.ndim <= 4 and (mask.dtype == torch.bool or mask.dtype in FLOATING))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Tensor:
    """[batch, queries, heads, depth], contiguous. Under autocast all three have its dtype, as torch's own have."""
    dtype = autocast_dtype(query.device)
    if dtype is not None and not query.dtype == key.dtype == value.dtype == dtype:  # a cache may have its own
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _attention(query, key, value, mask, scale=scale, causal=causal)  # type: ignore[no-any-return]


@step("attention")
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    if not can_attend(query, key, value, mask) or not (gqa or query.shape[1] == key.shape[1]):
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=gqa
        )
    return attend(query, key, value, mask, causal=causal, scale=scale).transpose(1, 2)


@in_place_of(functional.scaled_dot_product_attention, switch="fuse_attention")
def _attention_of_torch(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    heads_fit = enable_gqa or query.shape[1:2] == key.shape[1:2]
    if dropout_p or not heads_fit or not can_attend(query, key, value, attn_mask):
        return NotImplemented
    return attend(query, key, value, attn_mask, causal=is_causal, scale=scale).transpose(1, 2)


def join_masks(first: Any, second: Any) -> Any:
    """Two masks as one: of booleans, where True takes part, or to be added."""
    if first.dtype == second.dtype == torch.bool:
        return first & second
    dtype = second.dtype if first.dtype == torch.bool else first.dtype
    first, second = (
        torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask
        for mask in (first, second)
    )
    return first + second


class FindAttention(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_attention"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.scaled_dot_product_attention):
            query, key, value = node.args[:3] if len(node.args) >= 3 else (None, None, None)
            names: Any = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
            mask, dropout, causal, scale, gqa = (
                argument(node, place, name) for place, name in enumerate(names, start=3)
            )
            if query is None or len(shape_of(query)) != 4 or dropout or dtype_of(query) not in FLOATING:
                continue
            kwargs = {"causal": bool(causal), "scale": scale, "gqa": bool(gqa)}
            replace(graph, node, scaled_dot_product_attention, (query, key, value, mask), kwargs)
