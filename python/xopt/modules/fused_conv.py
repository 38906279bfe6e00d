"""What follows a convolution or a transposed one, done with its sums: BatchNorm, activation, addition of a residual."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from torch.fx import Graph
from torch.nn import functional

from xopt.graph.steps import expect
from xopt.modules.conv import conv
from xopt.modules.conv_transpose import conv_transpose
from xopt.modules.fused_linear import fuse_activations, fuse_batch_norm, fuse_binary
from xopt.modules.pattern import Pattern, argument, calls, is_call, shape_of

_CONVOLUTIONS = (conv, conv_transpose)


class ConvPadding(Pattern):
    """Zeros that a forward puts around an image itself, as TensorFlow's kind of padding wants it."""

    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, conv):
            source: Any = node.args[1]
            if not is_call(source, functional.pad) or node.kwargs.get("pad"):
                continue
            pad = argument(source, 1, "pad")
            plain = argument(source, 2, "mode", "constant") == "constant" and not argument(source, 3, "value", 0)
            if plain and isinstance(pad, (tuple, list)) and len(pad) <= 2 * (len(shape_of(source)) - 2):
                node.args = (node.args[0], source.args[0])
                node.kwargs = {**node.kwargs, "pad": tuple(pad)}


class ConvBatchNorm(Pattern):
    stage: ClassVar[int] = 2
    switch: ClassVar[str] = "conv_bn_folding"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for target in _CONVOLUTIONS:
            fuse_batch_norm(graph, target)


class ConvActivation(Pattern):
    stage: ClassVar[int] = 3
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for target in _CONVOLUTIONS:
            fuse_activations(graph, target)


class ConvBinary(Pattern):
    stage: ClassVar[int] = 3
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for target in _CONVOLUTIONS:
            fuse_binary(graph, target)


class ConvLastActivation(Pattern):
    """The activation after a residual's addition, which `ConvActivation` came too early for."""

    stage: ClassVar[int] = 4
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for target in _CONVOLUTIONS:
            fuse_activations(graph, target)


class KnownSizes(Pattern):
    """Takes out what a forward expects of a convolution's result (TensorFlow's padding looks at each image), where the
    same was expected of the image that it came from."""

    stage: ClassVar[int] = 5
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        known: set[tuple[Any, Any]] = set()
        for node in list(graph.nodes):
            if node.target is expect:
                function, size, _, outcome = node.args
                if function is operator.eq and outcome is True and is_call(size, "size"):
                    what: Any = tuple(size.args)
                    if what in known:
                        graph.erase_node(node)
                    known.add(what)
            elif is_call(node, conv):
                other = node.kwargs.get("other")  # might be spread over more than the result
                sizes = [dim for image, dim in known if image is node.args[1]]
                known |= {(node, dim) for dim in sizes if other is None or (other, dim) in known}
