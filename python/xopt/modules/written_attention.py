"""Attention that a forward writes out (a product, a softmax, another product), found and given to xopt's kernel.

The last product may also be that of the transposed values with the transposed weights, as forwards have it that keep
channels before positions (SAGAN, CompVis' autoencoders, EfficientViT). Scores may have one more column, of sinks, which
is dropped after the softmax (GPT-OSS, DeepSeek-V4, MiMo-V2).
"""

from __future__ import annotations

import math
import operator
from typing import Any, ClassVar, NamedTuple

import torch
from torch.fx import Graph, Node

from xopt.modules.attention import join_masks, put_attention
from xopt.modules.pattern import (
    ADD,
    DIVIDE,
    MATMUL,
    MULTIPLY,
    SUBTRACT,
    Pattern,
    allow_copies,
    argument,
    calls,
    described,
    dtype_of,
    is_call,
    is_cast,
    is_of_weights,
    only_reader,
    only_user,
    operands,
    permutation,
    put_in_place,
    readers,
    shape_of,
    transposed_matrix,
)
from xopt.modules.softmax import SOFTMAX, is_along_last
from xopt.ops.fakes import FLOATING

_VIEWS = (torch.reshape, "view", "reshape")
# What einsum calls the two products, whichever letters it uses.
_SCORES = "abcd,abed->abce"
_OUTPUT = "abcd,abde->abce"


class _Written(NamedTuple):
    query: Node
    key: Node
    """As [..., keys, depth]; `key_is_transposed` says that it stands as [..., depth, keys]."""
    key_is_transposed: bool
    value: Node
    """As [..., keys, depth], or, where `gives_columns`, as [..., depth, keys], as the result has the queries."""
    gives_columns: bool
    scale: Any
    factors: list[Node]
    """One for each head, which the query is multiplied by beforehand."""
    masks: list[tuple[str, Any, Any]]
    """From the inside to the outside: ("add", mask, its factor), ("fill", where, value), ("keep", where, value
    elsewhere) or ("windows", mask, None)."""
    heads: tuple[Any, ...] | None
    """Of products of [batch * heads, ...] whose scores are seen as [batch, heads, ...] by masks: both sizes."""
    flat_masks: int
    """How many of the masks, from the inside, are put on the scores before that."""
    passed: list[Node]
    """The steps between both products, with the first of them, which end in none but this attention."""
    sinks: Any
    """As [batch, heads, queries, 1], or None."""


class FindWrittenAttention(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_attention"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in [*calls(graph, *MATMUL), *calls(graph, torch.einsum)]:
            found = _attention(node)
            if found is not None:
                _tell_sizes(graph, found)
                _put(graph, node, found)


def _attention(node: Node) -> _Written | None:
    factors = _product(node, _OUTPUT)
    dims = len(shape_of(node))
    if factors is None or dims < 3:
        return None
    weights, value = factors
    of_columns = _transposed(value)
    gives_columns = of_columns is not None and is_call(_through_casts(of_columns), *SOFTMAX)
    if gives_columns:
        weights, value = value, weights
    softmax = _through_casts(of_columns if gives_columns else weights)
    softmax = _through_casts(_seen_as(softmax, 4)) or softmax if dims == 3 else softmax
    sinks: Any = None
    if dims == 4 and is_call(softmax, operator.getitem) and softmax.args[1] == (..., slice(None, -1, None)):
        softmax = _through_casts(softmax.args[0])
        sinks = _sinks(softmax)
        if sinks is None:
            return None
    if not is_call(softmax, *SOFTMAX) or only_reader(softmax) is None or not is_along_last(softmax):
        return None
    masks: list[tuple[str, Any, Any]] = []
    scale: list[Any] = []
    heads, outer_masks = None, 0
    scores: Any = softmax.args[0]
    passed: list[Node] = [*_before_softmax(weights, softmax), softmax]
    if sinks is not None:
        scores, sinks = sinks
        passed = []  # none of them has as many columns as there are keys
    while True:
        scores = _through_casts(scores)
        if not isinstance(scores, Node) or only_reader(scores) is None:
            return None
        passed.append(scores)
        flat = _seen_as(scores, dims) if heads is None and len(shape_of(softmax)) > dims else None
        if flat is not None:
            heads, outer_masks = _given_sizes(scores)[:2], len(masks)
            scores = flat
            continue
        inner = None if scale else _unmasked(scores, masks) or _without_windows(scores, masks)
        inner = inner or _unscaled(scores, scale)
        if inner is None:
            break
        scores = inner
    transposed = _product(scores, _SCORES) is None or not is_call(scores, torch.einsum)
    product = _product(scores, _SCORES) or _product(scores, _OUTPUT) or _product_and_mask(scores, masks, scale)
    if product is None or len(shape_of(scores)) != dims or not _fits(node, product, value) or (dims > 4 and masks):
        return None
    if heads is None and len(shape_of(softmax)) != dims:
        return None
    query, key = product
    if transposed and (as_rows := transposed_matrix(key)) is not None:
        key, transposed = as_rows, False
    numbers = [factor for factor in scale if not isinstance(factor, Node)]
    of_heads = [factor for factor in scale if isinstance(factor, Node)]
    flat_masks = 0 if heads is None else len(masks) - outer_masks
    return _Written(
        query,
        key,
        transposed,
        value,
        gives_columns,
        float(math.prod(numbers)),
        of_heads,
        masks[::-1],
        heads,
        flat_masks,
        passed,
        sinks,
    )


def _sinks(softmax: Any) -> tuple[Node, Node] | None:
    """The scores and the one column more that a softmax is of, both less their largest or as they are."""
    if not is_call(softmax, *SOFTMAX):
        return None
    logits = _through_casts(softmax.args[0])
    less = operands(logits, SUBTRACT)
    if less is not None:
        logits, largest = less
        others = [reader for reader in readers(logits) if reader is not largest]
        if not is_call(largest, torch.amax) or largest.args != (logits, -1, True) or len(others) != 1:
            return None
    elif only_reader(logits) is None:
        return None
    parts = argument(logits, 0, "tensors") if is_call(logits, torch.cat, torch.concat) else None
    dim = argument(logits, 1, "dim", 0) if parts is not None else None
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (-1, len(shape_of(logits)) - 1):
        return None
    scores, sinks = parts
    if shape_of(sinks)[-1:] != (1,) or dtype_of(sinks) not in FLOATING:
        return None
    return scores, sinks.args[0] if is_call(sinks, "expand") else sinks  # the kernel broadcasts them


def _transposed(node: Any) -> Any:
    """What a change of the last two dimensions with each other is of, if nobody else wants it."""
    if not isinstance(node, Node) or only_reader(node) is None:
        return None
    last = len(shape_of(node)) - 1
    return node.args[0] if permutation(node) == (*range(last - 1), last, last - 1) else None


def _before_softmax(node: Any, softmax: Node) -> list[Node]:
    """The views and casts from the weights that a product takes to the softmax that gives them."""
    nodes = []
    while node is not softmax:
        nodes.append(node)
        node = node.args[0]
    return nodes


def _seen_as(node: Any, dims: int) -> Any:
    """What a view with other dimensions before the last two is a view of, if that has so many."""
    if not is_call(node, *_VIEWS) or only_reader(node) is None:
        return None
    source = node.args[0]
    return source if len(shape_of(source)) == dims and shape_of(source)[-2:] == shape_of(node)[-2:] else None


def _given_sizes(view: Node) -> tuple[Any, ...]:
    return tuple(view.args[1] if isinstance(view.args[1], (tuple, list)) else view.args[1:])


def _product_and_mask(node: Node, masks: list[tuple[str, Any, Any]], scale: list[Any]) -> tuple[Node, Node] | None:
    """baddbmm(mask, query, key): the factors of the product; mask and scale are added to the others."""
    if not is_call(node, torch.baddbmm, "baddbmm") or scale:
        return None
    mask, query, key = (argument(node, place, name) for place, name in enumerate(("input", "batch1", "batch2")))
    beta, alpha = argument(node, 3, "beta", 1), argument(node, 4, "alpha", 1)
    if (
        not all(isinstance(each, Node) and shape_of(each) for each in (mask, query, key))
        or dtype_of(mask) not in FLOATING
    ):
        return None
    if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)) or not alpha:
        return None
    scale.append(alpha)
    if beta:
        masks.append(("add", mask, beta))
    return query, key


def _fits(node: Node, product: tuple[Node, Node], value: Node) -> bool:
    tensors = [node, *product, value]
    dtypes = {dtype_of(tensor) for tensor in tensors}
    if not dtypes <= set(FLOATING) or len({len(shape_of(tensor)) for tensor in tensors}) != 1:
        return False
    if torch.is_autocast_enabled("cpu"):
        return dtype_of(node) == torch.get_autocast_dtype("cpu")
    return len(dtypes) == 1


def _product(node: Any, equation: str) -> tuple[Node, Node] | None:
    """The factors of a product of matrices, all of whose other dimensions are the same."""
    if is_call(node, *MATMUL) and len(node.args) == 2 and not node.kwargs:
        left, right = node.args
    elif is_call(node, torch.einsum) and len(node.args) == 3 and _letters(node.args[0]) == equation:
        left, right = node.args[1:]
    else:
        return None
    if not isinstance(left, Node) or not isinstance(right, Node) or not shape_of(left) or not shape_of(right):
        return None
    return left, right


def _letters(equation: Any) -> str:
    """An equation with its letters named in the order of their first use."""
    names: dict[str, str] = {}
    text = str(equation).replace(" ", "")
    return "".join(names.setdefault(each, chr(ord("a") + len(names))) if each.isalpha() else each for each in text)


def _through_casts(node: Any) -> Any:
    while is_cast(node) and only_user(node) is not None:
        node = node.args[0]
    return node


def _tell_sizes(graph: Graph, found: _Written) -> None:
    """Lets those who ask for sizes of the scores ask query and key, where these know."""
    for node in found.passed:
        dims = len(shape_of(node))
        for user in [
            user for user in node.users if is_call(user, "size") and isinstance(argument(user, 1, "dim"), int)
        ]:
            dim = argument(user, 1, "dim") % dims
            if dim < dims - 2 and (dim > 0 or dims > 3):
                continue
            keys_at = -1 if found.key_is_transposed else -2
            source, place = (found.key, keys_at) if dim == dims - 1 else (found.query, -2 if dim else 0)
            with graph.inserting_before(user):
                size = graph.call_method("size", (source, place))
            size.meta.update(user.meta)
            user.replace_all_uses_with(size)
            graph.erase_node(user)


def _unmasked(node: Node, masks: list[tuple[str, Any, Any]]) -> Any:
    """What a mask is put on; the mask is added to `masks`."""
    found = operands(node, ADD)
    if found is not None:
        for scores, mask in (found, found[::-1]):
            if dtype_of(mask) in FLOATING and _is_mask(mask) and shape_of(scores) == shape_of(node):
                masks.append(("add", mask, None))
                return scores
    if is_call(node, torch.masked_fill, "masked_fill") and len(node.args) == 3:
        scores, where, value = node.args
        if isinstance(value, (int, float)) and _is_mask(where) and shape_of(scores) == shape_of(node):
            masks.append(("fill", where, value))
            return scores
    if is_call(node, torch.where) and len(node.args) == 3:
        where, scores = node.args[:2]
        other: Any = node.args[2]
        number = isinstance(other, (int, float)) or (isinstance(other, torch.Tensor) and other.ndim == 0)
        if number and _is_mask(where) and shape_of(scores) == shape_of(node):
            masks.append(("keep", where, float(other)))
            return scores
    return None


def _without_windows(node: Node, masks: list[tuple[str, Any, Any]]) -> Any:
    """The same where the mask is one of windows, and is put on scores that are seen as [image, window, ...] for it."""
    if not is_call(node, *_VIEWS) or len(shape_of(node)) != 4:
        return None
    found: list[Any] = []
    seen: Any = node.args[0]
    while (added := operands(seen, ADD)) is not None and only_user(seen) is not None:
        pairs = [(one, other) for one, other in (added, added[::-1]) if shape_of(one) == shape_of(seen)]
        seen, mask = next(((one, other) for one, other in pairs if _is_mask(other)), (None, None))
        if dtype_of(mask) not in FLOATING or not 3 <= len(shape_of(mask)) <= 5:
            return None
        found.append(mask)
    if not found or not is_call(seen, *_VIEWS) or only_user(seen) is None or len(shape_of(seen)) != 5:
        return None
    sizes = _given_sizes(seen)
    scores = seen.args[0]
    same = shape_of(scores) == shape_of(node) and shape_of(seen)[-3:] == shape_of(node)[-3:]
    if not same or (type(sizes[0]) is int and sizes[0] != -1):  # which some batches are no multiple of
        return None
    masks += [("windows", mask, None) for mask in found]
    return scores


def _is_mask(mask: Any) -> bool:
    """Whether it is no product itself: of two tensors of the scores' shape, either might be the mask."""
    return isinstance(mask, Node) and bool(shape_of(mask)) and _product(_through_casts(mask), _SCORES) is None


def _unscaled(node: Node, scale: list[Any]) -> Any:
    for targets, inverse in ((MULTIPLY, False), (DIVIDE, True)):
        found = operands(node, targets)
        if found is None:
            continue
        for scores, factor in (found,) if inverse else (found, found[::-1]):
            number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor != 0
            if number and isinstance(scores, Node):
                scale.append(1.0 / factor if inverse else factor)
                return scores
            if not inverse and isinstance(scores, Node) and _is_one_a_head(factor) and shape_of(scores)[-2:] != (1, 1):
                scale.append(factor)
                return scores
    return None


def _is_one_a_head(factor: Any) -> bool:
    return isinstance(factor, Node) and shape_of(factor)[-2:] == (1, 1) and is_of_weights(factor)


def _put(graph: Graph, node: Node, found: _Written) -> None:
    allow_copies(node)
    with graph.inserting_before(node):

        def method(name: str, *args: Any) -> Node:
            return described(graph.call_method(name, args))

        def call(function: Any, *args: Any) -> Node:
            return described(graph.call_function(function, args))

        key = method("transpose", found.key, -2, -1) if found.key_is_transposed else found.key
        query = found.query
        for factor in found.factors:
            query = method("to", call(torch.mul, query, factor), dtype_of(query))
        value = method("transpose", found.value, -2, -1) if found.gives_columns else found.value
        tensors = [query, key, value]
        if found.heads is not None:
            tensors = [call(with_heads, tensor, *found.heads) for tensor in tensors]
        mask: Any = None
        for place, (kind, each, filling) in enumerate(found.masks):
            if place < found.flat_masks:
                each = call(with_heads, each, *(found.heads or ()))
            added = each if (kind, filling) == ("add", None) else call(as_mask, kind, each, filling)
            mask = added if mask is None else call(join_masks, mask, added)
        result = put_attention(graph, tensors, mask, dtype_of(node), causal=False, scale=found.scale, sinks=found.sinks)
        if found.heads is not None:
            result = method("flatten", result, 0, 1)
        if found.gives_columns:
            result = method("transpose", described(result), -2, -1)
    put_in_place(graph, node, result)


def as_mask(kind: str, mask: torch.Tensor, value: Any) -> torch.Tensor:
    """As attention takes it: of booleans, where True takes part, or to be added. A finite value that scores are filled
    with stays what it is, so that a row in which all are hidden comes out as it did. That of windows has a dimension
    for images, and one for the windows of each."""
    if kind == "add":
        return mask if value is None else mask * value
    if kind == "windows":
        return mask.reshape((1,) * (5 - mask.ndim) + mask.shape)
    if kind == "keep":
        mask = ~mask.bool()
    if value == -math.inf:
        return ~mask.bool()
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask.bool(), value)


def with_heads(tensor: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """[batch * heads, ...] as [batch, heads, ...]; what is the same for all of them fits as it is."""
    if tensor.ndim < 3 or tensor.shape[0] == 1:
        return tensor if tensor.ndim < 3 else tensor.unsqueeze(0)
    return tensor.reshape(batch, heads, *tensor.shape[1:])
