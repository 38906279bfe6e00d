"""A BatchNorm that a forward writes out after a convolution, from statistics that are frozen (detectors keep them so):

    scale = weight / sqrt(variance + eps);  convolution * scale + (bias - mean * scale)

It is done with the sums, like one that is a module.
"""

from __future__ import annotations

import math
import operator
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE
from xopt.modules.conv import conv
from xopt.modules.conv_transpose import conv_transpose
from xopt.modules.folded_norm import forget_folded
from xopt.modules.fused_linear import is_open
from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    SUBTRACT,
    Pattern,
    calls,
    dtype_of,
    is_call,
    is_cast,
    is_stored_vector,
    only_user,
    operands,
    orders,
    replace,
    shape_of,
)


class WrittenBatchNorm(Pattern):
    stage: ClassVar[int] = 2
    switch: ClassVar[str] = "conv_bn_folding"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *ADD):
            for scaled, shift in orders(node, ADD):
                for source, scale in orders(scaled, MULTIPLY):
                    norm = _norm(node, scaled, source, scale, shift)
                    if norm is not None:
                        forget_folded(source.args[0].meta[EXAMPLE])
                        kwargs = source.kwargs | norm | {"out_dtype": dtype_of(node)}
                        replace(graph, node, source.target, source.args, kwargs)
                        break


def _norm(node: Node, scaled: Node, source: Any, scale: Any, shift: Any) -> dict[str, Any] | None:
    """What is to be done to a convolution's sums, if this is a norm of nothing but what it gives."""
    is_conv = is_open(source, conv) or is_open(source, conv_transpose)
    if not is_conv or source.kwargs.keys() & {"norm", "other"}:
        return None
    if only_user(source) is not scaled or only_user(scaled) is not node or shape_of(node) != shape_of(source):
        return None
    if not is_one_a_channel(scale, source) or not is_one_a_channel(shift, source):
        return None
    for weight, inverse in orders(vector_of(scale), MULTIPLY):
        root = vector_of(inverse)
        if not is_call(root, torch.rsqrt, "rsqrt"):
            continue
        variance, eps = operands(vector_of(root.args[0]), ADD) or (None, None)
        bias, moved = operands(vector_of(shift), SUBTRACT) or (None, None)
        for mean, factor in orders(vector_of(moved), MULTIPLY):
            norm = tuple(map(vector_of, (mean, variance, weight, bias)))
            if vector_of(factor) is vector_of(scale) and isinstance(eps, float) and all(map(is_stored_vector, norm)):
                return {"norm": norm, "eps": eps}
    return None


def vector_of(node: Any) -> Any:
    """What is seen as one value a channel, whatever view of it that is."""
    while is_cast(node) or _is_view_of_vector(node):
        node = node.args[0]
    return node


def _is_view_of_vector(node: Any) -> bool:
    if is_call(node, operator.getitem, "__getitem__"):  # weight[None, :, None, None]
        key = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(each is None or each is Ellipsis or each == slice(None) for each in key)
    if not is_call(node, "view", "reshape", torch.reshape, "unsqueeze", torch.unsqueeze):
        return False
    return sum(size != 1 for size in shape_of(node.args[0])) <= 1


def is_one_a_channel(node: Any, image: Node) -> bool:
    shape = shape_of(node)
    given = (1,) * (len(shape_of(image)) - len(shape)) + shape
    return given[1:2] == shape_of(image)[1:2] == (math.prod(given),)
