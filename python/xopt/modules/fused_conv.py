"""What follows a convolution, done with its sums: BatchNorm, activation, addition of a residual."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from xopt.modules.conv import conv
from xopt.modules.fused_linear import fuse_activations, fuse_binary, is_open
from xopt.modules.pattern import Pattern, argument, calls, dtype_of, only_user, replace

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_BATCH_NORM_ARGUMENTS = ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias"))


class ConvBatchNorm(Pattern):
    stage: ClassVar[int] = 2
    switch: ClassVar[str] = "conv_bn_folding"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.batch_norm):
            source: Any = node.args[0]
            if not is_open(source, conv) or source.kwargs.keys() & {"norm", "other"} or only_user(source) is not node:
                continue
            norm = tuple(argument(node, place, name) for place, name in _BATCH_NORM_ARGUMENTS)
            training, eps = argument(node, 5, "training", False), argument(node, 7, "eps", 1e-5)
            if training is not False or not all(_is_constant(each) for each in norm) or norm[0] is None:
                continue
            kwargs = source.kwargs | {"norm": norm, "eps": eps, "out_dtype": dtype_of(node)}
            replace(graph, node, conv, source.args, kwargs)


def _is_constant(node: Any) -> bool:
    return node is None or (isinstance(node, Node) and node.op == "get_attr" and dtype_of(node) in _FLOATING)


class ConvActivation(Pattern):
    stage: ClassVar[int] = 3
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        fuse_activations(graph, conv)


class ConvBinary(Pattern):
    stage: ClassVar[int] = 3
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        fuse_binary(graph, conv)


class ConvLastActivation(Pattern):
    """The activation after a residual's addition, which `ConvActivation` came too early for."""

    stage: ClassVar[int] = 4
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        fuse_activations(graph, conv)
