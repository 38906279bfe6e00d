"""Scaled dot product attention on xopt's kernel, wherever a recorded forward calls torch's."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.autocast import autocast_dtype
from xopt.graph.record import EXAMPLE
from xopt.modules.base import has_kernels
from xopt.modules.chain import Call, Seen, Shape, Value, chainable
from xopt.modules.fixed_dtype import has_fixed_dtype
from xopt.modules.gradients import wants_gradient
from xopt.modules.pattern import (
    MULTIPLY,
    VIEWS,
    Pattern,
    allow_copies,
    argument,
    calls,
    described,
    dtype_of,
    is_call,
    is_cast,
    is_view,
    only_reader,
    permutation,
    put_in_place,
    remove_unused,
    shape_of,
    step,
)
from xopt.modules.repeated_heads import before_repeats
from xopt.modules.substitute import are_plain, in_place_of
from xopt.modules.views import transposed
from xopt.ops.fakes import FLOATING
from xopt.ops.views import contiguous_unless_channels_last

_attention = torch.ops.xopt.attention.default


def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel takes these tensors."""
    dtype = query.dtype
    if query.ndim != 4 or dtype not in FLOATING or key.dtype != dtype or value.dtype != dtype:
        return False
    if not has_kernels(query.device) or key.shape[0] != query.shape[0] or key.shape[:3] != value.shape[:3]:
        return False
    if wants_gradient(query, key, value, mask):
        return False
    return mask is None or (mask.ndim <= 4 and (mask.dtype == torch.bool or mask.dtype in FLOATING))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[batch, queries, heads, depth], contiguous. Under autocast all three have its dtype, as torch's own have."""
    dtype = autocast_dtype(query.device)
    if dtype is not None and not query.dtype == key.dtype == value.dtype == dtype:  # a cache may have its own
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _attention(query, key, value, mask, scale=scale, causal=causal, sinks=sinks)  # type: ignore[no-any-return]


def attend_with_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    gqa: bool,
    sinks: Tensor | None,
) -> Tensor:
    """[batch, heads, queries, depth]. Of sinks torch's function knows nothing."""
    if sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=gqa
        )
    if gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.mT * (1.0 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        mask = seen if mask is None else join_masks(mask, seen)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    scores = torch.cat([scores.float(), sinks.float().expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :-1].to(value.dtype) @ value


@step("attention")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    *,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    """`mask`: also one of windows, [images or 1, windows, heads, queries, keys], which a batch is full of. `sinks`: one
    more score for each query, of no value, as [batch, heads, queries, 1]."""
    of_windows = mask is not None and mask.ndim == 5
    if mask is not None and of_windows and mask.shape[0] != 1:
        mask, of_windows = mask.flatten(0, 1), False
    of_one_image = mask[0] if mask is not None and of_windows else mask
    fits = can_attend(query, key, value, of_one_image) and _heads_fit(query.shape, key.shape, gqa)
    if not fits or wants_gradient(sinks):
        if mask is not None and of_windows:
            mask = mask.expand(query.shape[0] // mask.shape[1], *mask.shape[1:]).flatten(0, 1)
        return attend_with_torch(query, key, value, mask, causal=causal, scale=scale, gqa=gqa, sinks=sinks)
    return attend(query, key, value, mask, causal=causal, scale=scale, sinks=sinks).transpose(1, 2)


def _heads_fit(query: Shape, key: Shape, gqa: bool) -> bool:
    """Whether torch takes these heads, too: one of the keys may be that of all queries, as with any broadcast."""
    return gqa or key[1] in (1, query[1])


def _are_one_without(dim: int, tensor: Tensor) -> bool:
    """Whether all dimensions before the last two, but for this one, can be seen as one."""
    rest = [each for each in range(tensor.ndim - 2) if each != dim and tensor.shape[each] != 1]
    return all(tensor.stride(one) == tensor.stride(other) * tensor.shape[other] for one, other in pairwise(rest))


@step("attention")
def attention_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Tensor:
    """Of tensors with more than four dimensions, all but the last two of which are the same. One of these is taken for
    the heads and the others for the batch: one for which no tensor has to be copied, if there is any."""
    lead = query.shape[:-2]
    if not lead == key.shape[:-2] == value.shape[:-2]:
        return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)
    places = (dim for dim in reversed(range(len(lead))) if all(_are_one_without(dim, t) for t in (query, key, value)))
    heads = next(places, len(lead) - 1)

    def in_a_batch(tensor: Tensor) -> Tensor:
        return tensor.movedim(heads, -3).flatten(0, -4)

    if mask is not None and mask.ndim > 2:
        mask = in_a_batch(mask.expand(*lead, *mask.shape[-2:]))
    query, key, value = map(in_a_batch, (query, key, value))
    attended = scaled_dot_product_attention(query, key, value, mask, causal=causal, scale=scale, gqa=False)
    return attended.reshape(*lead[:heads], *lead[heads + 1 :], *attended.shape[1:]).movedim(-3, heads)


def with_one_head(mask: Tensor) -> Tensor:
    """[batch, queries, keys] as [batch, 1, queries, keys]; without a batch it fits as it is."""
    return mask.unsqueeze(1) if mask.ndim == 3 else mask


def _rounded(graph: Graph, node: Any, dtype: torch.dtype | None) -> Any:
    """What is in fp32 in the narrower dtype of the attention's result, as the kernel takes all three: what was widened
    for the scores alone (GPT-J, GPT-Neo) as it was before, whatever views were taken of it."""
    if dtype_of(node) != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        return node
    source = node.args[0] if node.args else None
    if is_cast(node) and dtype_of(source) == dtype:
        return source
    if is_view(node):
        rounded = _rounded(graph, source, dtype)
        return described(graph.create_node(node.op, node.target, (rounded, *node.args[1:]), node.kwargs))
    return described(graph.call_method("to", (node, dtype)))


def put_attention(
    graph: Graph,
    tensors: Sequence[Any],
    mask: Any,
    dtype: torch.dtype | None,
    *,
    causal: bool,
    scale: float | None,
    gqa: bool = False,
    sinks: Any = None,
) -> Node:
    """The attention of tensors with three dimensions or more (four, where there are sinks), with a result of this
    dtype: steps where the graph stands."""
    dims = len(shape_of(tensors[0]))
    once = before_repeats(*tensors[1:]) if dims == 4 and not gqa else None
    tensors, gqa = (tensors, gqa) if once is None else ((tensors[0], *once), True)
    tensors = [_rounded(graph, tensor, dtype) for tensor in tensors]
    kwargs: dict[str, Any] = {"causal": causal, "scale": scale}
    if dims > 4:
        heads = _innermost_of_parts(tensors) if mask is None or len(shape_of(mask)) <= 2 else None
        if heads is None:
            return graph.call_function(attention_in_parts, (*tensors, mask), kwargs)
        order, lined_up, sizes = _in_batches(graph, tensors, heads)
        attended = described(put_attention(graph, lined_up, mask, dtype, **kwargs))
        attended = described(graph.call_method("reshape", (attended, (*sizes, -1))))
        return graph.call_method("permute", (attended, tuple(map(order.index, range(dims)))))
    if dims == 3:
        tensors = [described(graph.call_method("unsqueeze", (tensor, 1))) for tensor in tensors]
        mask = mask if mask is None else described(graph.call_function(with_one_head, (mask,)))
    arguments = (*tensors, mask) if sinks is None else (*tensors, mask, sinks)
    attended = described(graph.call_function(scaled_dot_product_attention, arguments, {**kwargs, "gqa": gqa}))
    return graph.call_method("squeeze", (attended, 1)) if dims == 3 else attended


def _innermost_of_parts(tensors: Sequence[Any]) -> int | None:
    """Of three parts of one tensor, which have the same dimensions then: the one before the last two that lies
    innermost in memory, as heads do in a projection's rows."""
    source: Any = tensors[0].args[0] if is_call(tensors[0], operator.getitem) else None
    if not is_call(source, "unbind", torch.unbind) or argument(source, 1, "dim", 0) != 0:
        return None
    order = permutation(source.args[0])
    if order is None or not all(is_call(each, operator.getitem) and each.args[0] is source for each in tensors):
        return None
    return max(range(len(order) - 3), key=order[1:-2].__getitem__)


def _in_batches(graph: Graph, tensors: Sequence[Any], heads: int) -> tuple[tuple[int, ...], list[Node], list[Node]]:
    """As `attention_in_parts` sees them, in views: in which order their dimensions are, these views, and the sizes that
    the query had in that order, but for the last."""
    dims = len(shape_of(tensors[0]))
    order = (*(dim for dim in range(dims - 2) if dim != heads), heads, dims - 2, dims - 1)
    query, *_ = lined_up = [described(graph.call_method("permute", (each, order))) for each in tensors]
    sizes = [graph.call_method("size", (query, dim)) for dim in range(dims - 1)]
    for size, example in zip(sizes, shape_of(query), strict=False):
        size.meta[EXAMPLE] = example
    return order, [described(graph.call_method("flatten", (each, 0, dims - 4))) for each in lined_up], sizes


attention_steps: dict[Any, str] = {scaled_dot_product_attention: "scale"}
"""Steps that take query, key, value and more, with the name of their scale. Integrations have more of them."""


def is_plain_attention(node: Node, mask: Any) -> bool:
    """Whether the kernel takes the recorded tensors, and those of all calls but for their sizes."""
    tensors: Any = node.args[:3]
    if not all(len(shape_of(each)) == 4 and has_fixed_dtype(each) for each in tensors):
        return False
    most = 5 if shape_of(mask)[:1] == (1,) else 4
    if mask is not None and (len(shape_of(mask)) > most or dtype_of(mask) not in (torch.bool, *FLOATING)):
        return False
    return dtype_of(node) in FLOATING and {dtype_of(each) for each in tensors} == {dtype_of(node)}


def attention_call(
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    *,
    causal: bool,
    scale: float | None,
    fits: Callable[..., bool] | None = None,
    one_sees_all: bool = False,
    sinks: Value | None = None,
) -> Call:
    def shape(query: Shape, key: Shape, value: Shape) -> Shape:
        return (query[0], query[2], query[1], value[3])

    arguments = (query, key, value, mask, None if scale is None else float(scale), causal, 0, 0, one_sees_all, sinks)
    return Call("attention", arguments, query, shape, others=(key, value), fits=fits)


def _is_plain(node: Node) -> bool:
    return is_plain_attention(node, node.args[3]) and all(dtype_of(sinks) in FLOATING for sinks in node.args[4:])


@chainable(scaled_dot_product_attention, where=_is_plain)
def _attention_call(
    seen: Seen,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    sinks: Value | None = None,
    *,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Call:
    def fits(query: Shape, key: Shape, value: Shape) -> bool:
        return key[0] == query[0] and key[:3] == value[:3] and _heads_fit(query, key, gqa)

    call = attention_call(query, key, value, mask, causal=causal, scale=scale, fits=fits, sinks=sinks)
    return transposed(seen.call(call), 1, 2)


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
    if dropout_p or not are_plain(query, key, value, attn_mask):
        return NotImplemented
    if query.ndim == key.ndim == value.ndim > 4 and not enable_gqa:
        return attention_in_parts(query, key, value, attn_mask, causal=is_causal, scale=scale).contiguous()
    if query.ndim == key.ndim == value.ndim == 3 and not enable_gqa:
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        mask = attn_mask if attn_mask is None else with_one_head(attn_mask)
        attended = scaled_dot_product_attention(query, key, value, mask, causal=is_causal, scale=scale, gqa=False)
        return attended.squeeze(1)
    if not can_attend(query, key, value, attn_mask) or not _heads_fit(query.shape, key.shape, enable_gqa):
        return NotImplemented
    return attend(query, key, value, attn_mask, causal=is_causal, scale=scale).transpose(1, 2)


def join_masks(first: Any, second: Any) -> Any:
    """Two masks as one: of booleans, where True takes part, or to be added. One of them may be one of windows, and the
    other then is what it is for each of them, or for all."""
    if 5 in (first.ndim, second.ndim):
        windows = max(mask.shape[1] for mask in (first, second) if mask.ndim == 5)
        first, second = (
            mask.unflatten(0, (-1, windows)) if mask.ndim == 4 and mask.shape[0] > 1 else mask
            for mask in (first, second)
        )
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
        for node in calls(graph, *attention_steps):  # of integrations
            with graph.inserting_before(node):
                rounded = [_rounded(graph, each, dtype_of(node)) for each in node.args[:3]]
            node.args = (*rounded, *node.args[3:])
        for node in calls(graph, functional.scaled_dot_product_attention):
            query, key, value = node.args[:3] if len(node.args) >= 3 else (None, None, None)
            names: Any = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
            mask, dropout, causal, scale, gqa = (
                argument(node, place, name) for place, name in enumerate(names, start=3)
            )
            tensors = (query, key, value)
            dims = {len(shape_of(tensor)) for tensor in tensors}
            if dropout or dtype_of(query) not in FLOATING or len(dims) > 1 or min(dims) < 3 or (gqa and dims != {4}):
                continue
            if len(shape_of(mask)) > min(dims):  # the result has as many dimensions as such a mask
                continue
            allow_copies(node)
            with graph.inserting_before(node):
                found = put_attention(
                    graph, tensors, mask, dtype_of(node), causal=bool(causal), scale=scale, gqa=bool(gqa)
                )
            put_in_place(graph, node, found)


class AttendAsItLies(Pattern):
    """Queries, keys and values are read as they lie, and a number that queries were multiplied by is a factor of the
    scores: no pass over them before attention."""

    stage: ClassVar[int] = 4
    switch: ClassVar[str] = "fuse_attention"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *attention_steps):
            node.args = (*map(_without_copy, node.args[:3]), *node.args[3:])
        remove_unused(graph)
        for node in calls(graph, *attention_steps):
            scale = node.kwargs[attention_steps[node.target]]
            found = None if scale is None else _multiplied(node, node.args[0])
            if found is not None:
                source, factor = found.args
                allow_copies(found)
                found.replace_all_uses_with(source)
                node.kwargs = {**node.kwargs, attention_steps[node.target]: scale * factor}


def _without_copy(node: Any) -> Any:
    while is_call(node, "contiguous", contiguous_unless_channels_last) and len(node.args) == 1 and not node.kwargs:
        node = node.args[0]
    return node


def _multiplied(reader: Node, node: Any) -> Any:
    """The product with a number that a view is of, if nobody else reads it."""
    while only_reader(node) is reader:
        if is_call(node, *MULTIPLY):
            values = len(node.args) == 2 and isinstance(node.args[0], Node) and type(node.args[1]) is float
            return node if values and dtype_of(node) == dtype_of(node.args[0]) and node.args[0] is not reader else None
        if not is_call(node, *VIEWS):
            return None
        reader, node = node, node.args[0]
    return None
