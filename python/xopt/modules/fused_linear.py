"""What follows a product, done while its results are in registers: activation, addition of a residual, product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

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
    only_user,
    orders,
    replace,
    shape_of,
    used_only_for,
)
from xopt.ops.fakes import FLOATING


class LinearBatchNorm(Pattern):
    stage: ClassVar[int] = 2
    switch: ClassVar[str] = "linear_bn_folding"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        # Of two dimensions: with three, BatchNorm1d takes the middle one for the channels.
        fuse_batch_norm(graph, linear, lambda source: len(shape_of(source)) == 2)


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


def fuse_batch_norm(graph: Graph, target: Any, fits: Callable[[Node], bool] = lambda source: True) -> None:
    for node in calls(graph, functional.batch_norm):
        source: Any = node.args[0]
        if not is_open(source, target) or source.kwargs.keys() & {"norm", "other"} or only_user(source) is not node:
            continue
        norm = norm_of(node)
        if norm is not None and fits(source):
            layer: Any = source.args[0]
            forget_folded(layer.meta[EXAMPLE])
            replace(graph, node, target, source.args, source.kwargs | norm | {"out_dtype": dtype_of(node)})


def fuse_activations(graph: Graph, target: Any) -> None:
    """Into the steps of a product, which is what `target` computes."""
    for node in list(graph.nodes):
        found = activation_of(node)
        if found is None or not is_open(found[0], target) or dtype_of(node) != dtype_of(found[0]):
            continue
        source, activation = found
        if not used_only_for(source, node):
            continue
        kwargs = source.kwargs | activation | {"out_dtype": dtype_of(node)}
        if "other" in source.kwargs:
            kwargs["activation_last"] = True
        replace(graph, node, target, source.args, kwargs)


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
