"""A gated pair: act(gate(x)) * up(x), as one product whose two results meet in registers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE
from xopt.modules.activation import ACTIVATIONS, activation_of
from xopt.modules.computed_weight import weight_of
from xopt.modules.linear import PackedProduct, linear
from xopt.modules.packed_parameter import PackedParameter, are_pair, pack_as_pair
from xopt.modules.pattern import MULTIPLY, Pattern, calls, dtype_of, only_user, operands, replace, step, used_only_for

gated_product = torch.ops.xopt.linear_gated.default


class GatedPair(Pattern):
    stage: ClassVar[int] = 1  # before siblings are merged: of these two, this is the better way
    switch: ClassVar[str] = "fuse_gated_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *MULTIPLY):
            found = operands(node, MULTIPLY)
            for activated, up in [] if found is None else [found, found[::-1]]:
                gate = activation_of(activated)
                if gate is not None and _fit(node, activated, gate[0], up):
                    args = (gate[0].args[0], up.args[0], up.args[1])
                    replace(graph, node, gated_linear, args, gate[1] | {"out_dtype": dtype_of(node)})
                    break


def _fit(node: Node, activated: Any, gate: Any, up: Any) -> bool:
    for each in (gate, up):
        if not isinstance(each, Node) or each.target is not linear or set(each.kwargs) != {"out_dtype"}:
            return False
    modules: list[Any] = [each.args[0].meta[EXAMPLE] for each in (gate, up)]
    weights = [weight_of(module) for module in modules]
    if not all(type(weight) is PackedParameter for weight in weights):
        return False
    return (
        gate.args[1] is up.args[1]
        and modules[0] is not modules[1]
        and weights[0].shape == weights[1].shape
        and only_user(up) is node
        and only_user(activated) is node
        and used_only_for(gate, activated)
        and dtype_of(node) == dtype_of(gate) == dtype_of(up)
    )


@step(lambda kwargs: f"gated linear ({kwargs['activation']})")
def gated_linear(
    gate: PackedProduct,
    up: PackedProduct,
    input: torch.Tensor,
    *,
    activation: str,
    alpha: float = 0.0,
    beta: float = 0.0,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    weights: list[Any] = [weight_of(gate), weight_of(up)]
    packed = all(type(weight) is PackedParameter for weight in weights)
    if not packed or not (are_pair(*weights) or pack_as_pair(*weights)):
        return ACTIVATIONS[activation](linear(gate, input), alpha, beta) * linear(up, input)
    return gated_product(  # type: ignore[no-any-return]
        input,
        weights[0].place.packed,
        gate.out_features,
        gate._parameters["bias"],
        up._parameters["bias"],
        activation=activation,
        alpha=alpha,
        beta=beta,
        out_dtype=out_dtype,
    )
