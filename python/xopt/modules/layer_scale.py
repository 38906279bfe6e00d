"""A layer scale (what a linear layer or a convolution gives, times a parameter of one value for each feature), done
with the sums.

    residual + scale * linear(x)

The packed weight stays as it is: see `folded_norm.py`, of which a layer scale is the part that has no statistics. Where
tokens are an image again before the residual is added (ConvNeXt), the residual is seen as tokens instead, so that the
product can take it along.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE
from xopt.modules.conv import conv
from xopt.modules.folded_norm import forget_folded
from xopt.modules.fused_linear import is_open
from xopt.modules.linear import linear
from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    Pattern,
    allow_copies,
    calls,
    dtype_of,
    is_call,
    is_cast,
    is_stored,
    is_stored_vector,
    only_user,
    orders,
    permutation,
    put_in_place,
    replace,
    shape_of,
)
from xopt.modules.written_batch_norm import is_one_a_channel, vector_of

_VIEWS = ("view", "reshape", "unsqueeze", torch.reshape, torch.unsqueeze)


class LayerScale(Pattern):
    stage: ClassVar[int] = 2
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *MULTIPLY):
            for source, factor in orders(node, MULTIPLY):
                product = _permuted(source) or source
                vector = _vector(factor)
                if vector is None or not _is_plain_product(product, source, node):
                    continue
                if _is_along_features(node, source, product, factor):
                    _scale(graph, node, source, product, vector)
                    break


class ConvLayerScale(Pattern):
    stage: ClassVar[int] = 2
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *MULTIPLY):
            for source, factor in orders(node, MULTIPLY):
                vector = _channel_vector(factor, node)
                plain = is_open(source, conv) and "other" not in source.kwargs and shape_of(source) == shape_of(node)
                norm = _scaled_norm(source.kwargs.get("norm"), vector) if plain else None
                if vector is None or norm is None or only_user(source) is not node:
                    continue
                forget_folded(source.args[0].meta[EXAMPLE])
                replace(graph, node, conv, source.args, source.kwargs | {"norm": norm, "out_dtype": dtype_of(node)})
                break


def _scaled_norm(norm: Any, vector: Any) -> tuple[Any, ...] | None:
    """As `folded_norm.py` has it; None: there is a layer scale already."""
    if norm is None:
        return (None, None, vector, None)
    return (*norm, vector) if norm[0] is not None and len(norm) == 4 else None


def _channel_vector(factor: Any, image: Node) -> Any:
    """The parameter that a factor is which has one value for each of an image's channels."""
    stored = vector_of(factor)
    return stored if is_stored(stored) and is_one_a_channel(factor, image) else None


class ImageResidual(Pattern):
    """A residual that is added to a product's tokens once they are an image again."""

    stage: ClassVar[int] = 3
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *ADD):
            for source, residual in orders(node, ADD):
                product = _permuted(source)
                alike = isinstance(residual, Node) and shape_of(residual) == shape_of(node) == shape_of(source)
                if product is not None and alike and _is_plain_product(product, source, node):
                    _add_as_tokens(graph, node, source, product, residual)
                    break


def _permuted(node: Any) -> Any:
    """What a permutation of dimensions is made of."""
    return node.args[0] if is_call(node, "permute", torch.permute) and permutation(node) is not None else None


def _is_plain_product(product: Any, source: Node, node: Node) -> bool:
    """Whether a linear layer's result goes to `node` alone, be it by way of `source`."""
    if not is_open(product, linear) or "other" in product.kwargs:
        return False
    return only_user(source) is node and (source is product or only_user(product) is source)


def _vector(factor: Any) -> Any:
    """The parameter of one dimension that a factor is, whatever it is seen as."""
    while is_cast(factor) or is_call(factor, *_VIEWS):
        factor = factor.args[0]
    return factor if is_stored_vector(factor) else None


def _is_along_features(node: Node, source: Node, product: Node, factor: Node) -> bool:
    """Whether a factor has one value for each feature, and none of its own for anything else."""
    shape, features = shape_of(node), shape_of(product)[-1]
    dims = len(shape)
    dim = dims - 1 if source is product else (permutation(source) or ()).index(dims - 1)
    given = (1,) * (dims - len(shape_of(factor))) + shape_of(factor)
    return shape == shape_of(source) and given[dim : dim + 1] == (features,) and math.prod(given) == features


def _scale(graph: Graph, node: Node, source: Node, product: Node, vector: Node) -> None:
    scaled = product.kwargs | {"norm": (None, None, vector, None), "out_dtype": dtype_of(node)}
    if source is product:
        replace(graph, node, linear, product.args, scaled)
        return
    _become(replace(graph, product, linear, product.args, scaled), node)
    put_in_place(graph, node, source)


def _become(node: Node, like: Node) -> None:
    """Has the dtype of another node from now on."""
    described = node.meta[EXAMPLE]
    node.meta[EXAMPLE] = like.meta[EXAMPLE]._replace(shape=described.shape)


def _add_as_tokens(graph: Graph, node: Node, source: Node, product: Node, residual: Node) -> None:
    order = permutation(source) or ()
    back = tuple(order.index(dim) for dim in range(len(order)))
    with graph.inserting_before(node):
        tokens = graph.call_method("permute", (residual, *back))
        total = graph.call_function(torch.add, (product, tokens))
        image = graph.call_method("permute", (total, *order))
    tokens.meta[EXAMPLE] = node.meta[EXAMPLE]._replace(
        dtype=dtype_of(residual) or torch.float32, shape=shape_of(product)
    )
    total.meta[EXAMPLE] = tokens.meta[EXAMPLE]
    _become(total, node)
    put_in_place(graph, node, image)
    allow_copies(image)
