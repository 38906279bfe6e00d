"""Parts of a forward that turn autocast off: torch's functions there, where no pattern has taken them for something
else, are called without it, whatever it is for the rest of the program."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.autocast import without_autocast
from xopt.graph.parts import name_of
from xopt.graph.record import WITHOUT_AUTOCAST
from xopt.modules.pattern import Pattern, is_call, replace

# What autocast computes in a lower precision.
_ROUNDED = frozenset(
    {
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "addmm", "addbmm", "baddbmm", "einsum"),
        *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
        *("conv_transpose3d", "scaled_dot_product_attention", "multi_dot", "chain_matmul", "tensordot", "cdist"),
    }
)


class KeepAutocastOff(Pattern):
    stage: ClassVar[int] = 7  # what is left when all operators are found
    switch: ClassVar[str | None] = None

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in [each for each in graph.nodes if WITHOUT_AUTOCAST in each.meta and _is_torchs(each)]:
            replace(graph, node, called_without_autocast, (node.target, *node.args), dict(node.kwargs))


def _is_torchs(node: Node) -> bool:
    module = getattr(node.target, "__module__", None) or "torch"
    is_named = name_of(node.target) in _ROUNDED and is_call(node, node.target)
    return is_named and module.split(".")[0] in ("torch", "_operator")


def called_without_autocast(function: Any, *args: Any, **kwargs: Any) -> Any:
    with without_autocast():
        return (
            getattr(torch.Tensor, function)(*args, **kwargs) if isinstance(function, str) else function(*args, **kwargs)
        )
