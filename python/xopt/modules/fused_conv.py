"""What follows a convolution or a transposed one, done with its sums: BatchNorm, activation, addition of a residual."""

from __future__ import annotations

from typing import ClassVar

from torch.fx import Graph

from xopt.modules.conv import conv
from xopt.modules.conv_transpose import conv_transpose
from xopt.modules.fused_linear import fuse_activations, fuse_batch_norm, fuse_binary
from xopt.modules.pattern import Pattern

_CONVOLUTIONS = (conv, conv_transpose)


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
