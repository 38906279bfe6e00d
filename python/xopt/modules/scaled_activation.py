"""A factor and an addend of one value each behind a convolution's BatchNorm and ReLU (the learnable affine blocks of
HGNetV2, D-FINE and PP-LCNet):

    scale * relu(batch_norm(conv(x))) + shift

They are done with the sums. What they do to the activation's bounds they do to its input as well, so that
max(0, x) * scale + shift is max(shift, x * scale + shift), or the smaller of the two if the scale is negative: the
factor goes where the BatchNorm's goes (`folded_norm.py`), and a clamp is all that is left.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE
from xopt.modules.conv import conv
from xopt.modules.folded_norm import forget_folded
from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    Pattern,
    calls,
    dtype_of,
    is_stored,
    only_user,
    orders,
    replace,
    shape_of,
    without_casts,
)


class ScaledActivation(Pattern):
    stage: ClassVar[int] = 4  # when the activation is the convolution's
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *ADD):
            found = _found(node)
            if found is not None:
                source: Any = found[0]
                forget_folded(source.args[0].meta[EXAMPLE])
                affine = {"affine": found[1:], "out_dtype": dtype_of(node)}
                replace(graph, node, conv, source.args, source.kwargs | affine)


def _found(node: Node) -> tuple[Node, Node, Node] | None:
    """The convolution, the factor and the addend."""
    for scaled, shift in orders(node, ADD):
        for source, scale in orders(scaled, MULTIPLY):
            numbers = _one_value(scale), _one_value(shift)
            if None in numbers or not _is_bounded(source) or shape_of(source) != shape_of(node):
                continue
            if only_user(source) is scaled and only_user(scaled) is node:
                return source, *numbers
    return None


def _is_bounded(node: Any) -> bool:
    """A convolution with a BatchNorm and an activation that has bounds and is else nothing."""
    if not isinstance(node, Node) or node.target is not conv or node.kwargs.keys() & {"other", "affine"}:
        return False
    norm: Any = node.kwargs.get("norm") or (None,)
    return norm[0] is not None and node.kwargs.get("activation") in ("relu", "clamp")


def _one_value(node: Any) -> Any:
    """The parameter of one value that a factor or addend is."""
    stored = without_casts(node)
    return stored if is_stored(stored) and shape_of(stored) and math.prod(shape_of(stored)) == 1 else None
