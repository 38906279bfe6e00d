"""Products by a packed layer's weight that a forward writes out itself (`x @ self.head.weight.T`), on
`torch.ops.xopt.linear`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from xopt.graph.record import KIND
from xopt.modules.linear import times_weight
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.pattern import (
    MATMUL,
    Pattern,
    argument,
    calls,
    dtype_of,
    replace,
    shape_of,
    step,
    transposed_matrix,
)
from xopt.ops.fakes import FLOATING


class FindProductsByWeights(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "weights_prepack"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.linear):
            names = ("input", "weight", "bias")
            input, weight, bias = (argument(node, place, name) for place, name in enumerate(names))
            if _is_packed_matrix(weight) and dtype_of(input) in FLOATING:
                replace(graph, node, product_by_weight, (input, weight, bias), {})
        for node in calls(graph, *MATMUL):
            if len(node.args) != 2 or node.kwargs:
                continue
            input, weight = node.args[0], transposed_matrix(node.args[1])
            if _is_packed_matrix(weight) and dtype_of(input) in FLOATING and len(shape_of(input)) >= 2:
                replace(graph, node, product_by_weight, (input, weight, None), {})


def _is_packed_matrix(node: Any) -> bool:
    return isinstance(node, Node) and node.meta.get(KIND) is PackedParameter and len(shape_of(node)) == 2


@step("linear")
def product_by_weight(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = times_weight(input, weight, bias)
    return functional.linear(input, weight, bias) if product is NotImplemented else product
