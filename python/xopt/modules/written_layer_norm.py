"""A LayerNorm that a module writes out, over the last dimension:

y = x - x.mean(-1, keepdim=True)
y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight + bias
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.modules.norm import is_square_of, last_cast, layer_norm
from xopt.modules.pattern import (
    ADD,
    DIVIDE,
    MULTIPLY,
    SUBTRACT,
    Pattern,
    argument,
    calls,
    dtype_of,
    is_call,
    operands,
    orders,
    replace,
    shape_of,
    without_casts,
)
from xopt.ops.fakes import FLOATING

_MEAN = (torch.mean, "mean")


class FindLayerNorms(Pattern):
    """By its name it goes before `FindNorms`, to which the centered half of a LayerNorm is an RMSNorm."""

    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *ADD):
            found = _norm_of(node)
            if found is not None:
                x, weight, bias, eps = found
                last = last_cast(node)
                if {dtype_of(last), dtype_of(x)} <= set(FLOATING):
                    replace(graph, last, layer_norm, (x, weight, bias), {"eps": eps, "out_dtype": dtype_of(last)})


def _norm_of(node: Node) -> tuple[Node, Node, Node, float] | None:
    """Input, weight, bias and eps."""
    for scaled, bias in orders(node, ADD):
        for normed, weight in orders(without_casts(scaled), MULTIPLY):
            found = _normed(without_casts(normed))
            if found is not None and all(_is_vector(each, found[0]) for each in (weight, bias)):
                return found[0], without_casts(weight), without_casts(bias), found[1]
    return None


def _is_vector(node: Any, x: Node) -> bool:
    """A parameter of a value for each feature."""
    node = without_casts(node)
    return isinstance(node, Node) and node.op == "get_attr" and shape_of(node) == shape_of(x)[-1:]


def _normed(node: Any) -> tuple[Node, float] | None:
    """What is normed, and eps."""
    choices = [(operands(node, DIVIDE), (torch.sqrt, "sqrt"))]
    choices += [(pair, (torch.rsqrt, "rsqrt")) for pair in orders(node, MULTIPLY)]
    for pair, roots in choices:
        centered, root = map(without_casts, pair or (None, None))
        if not is_call(root, *roots):
            continue
        for variance, eps in orders(root.args[0], ADD):
            if isinstance(eps, float) and _is_variance(without_casts(variance), centered):
                x, mean = map(without_casts, operands(centered, SUBTRACT) or (None, None))
                return (x, eps) if _is_mean(mean) and without_casts(mean.args[0]) is x else None
    return None


def _is_variance(node: Any, centered: Any) -> bool:
    return _is_mean(node) and is_square_of(without_casts(node.args[0]), centered)


def _is_mean(node: Any) -> bool:
    """Over the last dimension, which is kept."""
    if not is_call(node, *_MEAN) or not shape_of(node.args[0]):
        return False
    dim = argument(node, 1, "dim", node.kwargs.get("axis"))
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    last = isinstance(dim, int) and dim in (-1, len(shape_of(node.args[0])) - 1)
    return last and argument(node, 2, "keepdim", False) is True and node.kwargs.get("dtype") is None
