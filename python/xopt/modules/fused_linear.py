"""What follows a product, done while its results are in registers: activation, addition of a residual, product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from xopt.graph.record import EXAMPLE
from xopt.modules.activation import activation_of
from xopt.modules.folded_norm import forget_folded, norm_of
from xopt.modules.linear import linear
from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    Pattern,
    calls,
    dtype_of,
    is_call,
    only_reader,
    only_user,
    orders,
    replace,
    seen_in_views,
    shape_of,
    used_only_for,
)
from xopt.ops.fakes import FLOATING

_FLAT = ("flatten", "view", "reshape", torch.flatten, torch.reshape)


class LinearBatchNorm(Pattern):
    stage: ClassVar[int] = 2
    switch: ClassVar[str] = "linear_bn_folding"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        # Of two dimensions: with three, BatchNorm1d takes the middle one for the channels. LeViT has it see its tokens,
        # whatever images they are of, as rows.
        fuse_batch_norm(graph, linear, lambda source: len(shape_of(source)) == 2, _of_rows)


class LinearActivation(Pattern):
    stage: ClassVar[int] = 3
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        fuse_activations(graph, linear)


class LinearBinary(Pattern):
    stage: ClassVar[int] = 3
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        fuse_binary(graph, linear)


def fuse_batch_norm(
    graph: Graph,
    target: Any,
    fits: Callable[[Node], bool] = lambda source: True,
    seen: Callable[[Node], Any] = lambda source: source,
) -> None:
    """`seen`: the product that a norm's input is a view of, with the channels where the norm has them."""
    for node in calls(graph, functional.batch_norm):
        source: Any = node.args[0]
        product: Any = seen(source)
        if not is_open(product, target) or product.kwargs.keys() & {"norm", "other"}:
            continue
        norm, reader = norm_of(node), only_user if source is product else only_reader
        if norm is not None and fits(source) and reader(source) is node:
            layer: Any = product.args[0]
            forget_folded(layer.meta[EXAMPLE])
            _put_behind(graph, node, source, product, norm)


def _of_rows(source: Node) -> Any:
    """The product, if its rows are put in a row, which changes nothing about its columns."""
    product = seen_in_views(source)
    flat = source.args[0] if is_call(source, *_FLAT) else source
    return product if flat is product and shape_of(product)[-1:] == shape_of(source)[-1:] else source


def _put_behind(graph: Graph, node: Node, source: Node, product: Node, after: dict[str, Any]) -> None:
    """The product with what follows it, in place of `node`, which does it to `source`: the product, or a view of it."""
    kwargs = product.kwargs | after | {"out_dtype": dtype_of(node)}
    if source is product:
        replace(graph, node, product.target, product.args, kwargs)
        return
    replace(graph, product, product.target, product.args, kwargs)
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def fuse_activations(graph: Graph, target: Any) -> None:
    """Into the steps of a product, which is what `target` computes. One may follow a view of the product."""
    for node in list(graph.nodes):
        found = activation_of(node)
        product: Any = None if found is None else seen_in_views(found[0])
        if found is None or not is_open(product, target) or dtype_of(node) != dtype_of(product):
            continue
        source, activation = found
        if not used_only_for(source, node):
            continue
        last = {"activation_last": True} if "other" in product.kwargs else {}
        _put_behind(graph, node, source, product, activation | last)


def fuse_binary(graph: Graph, target: Any) -> None:
    for binary, targets in (("add", ADD), ("mul", MULTIPLY)):
        for node in calls(graph, *targets):
            for source, other in reversed(orders(node, targets)):  # first what was computed last: fused, it stays there
                if not is_open(source, target) or "other" in source.kwargs or only_user(source) is not node:
                    continue
                if _is_alike(node, source, other):
                    kwargs = source.kwargs | {"binary": binary, "other": other, "out_dtype": dtype_of(node)}
                    replace(graph, node, target, source.args, kwargs)
                    break


def is_open(node: Any, target: Any) -> bool:
    """A product that no activation follows yet."""
    return isinstance(node, Node) and node.target is target and node.kwargs.get("activation", "none") == "none"


def _is_alike(node: Node, source: Node, other: Any) -> bool:
    """Whether both operands have the result's shape, which is that of the recorded call: `linear` looks again in each.
    Their dtypes may differ: a product in bf16 that is added to fp32 need not be rounded before."""
    return (
        isinstance(other, Node)
        and shape_of(other) == shape_of(node) == shape_of(source) != ()
        and dtype_of(other) in FLOATING
    )
