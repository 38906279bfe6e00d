"""A gated pair: act(gate(x)) * up(x), as one product whose two results meet in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE
from xopt.modules.activation import ACTIVATIONS, activation_of
from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.computed_weight import weight_of
from xopt.modules.linear import PackedProduct, has_own_packed_weight, linear
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.packed_together import are_pair, pack_as_pair
from xopt.modules.pattern import MULTIPLY, Pattern, calls, dtype_of, only_user, orders, replace, step, used_only_for
from xopt.ops.chain import Part

gated_product = torch.ops.xopt.linear_gated.default


@dataclass(frozen=True)
class Gated:
    """A product `activation(gate) * up`, all of whose steps nobody else uses."""

    node: Node
    gate: Node
    up: Node
    activation: dict[str, Any]


def each_gated(graph: Graph) -> Iterator[Gated]:
    """Either factor may be the gate. A product that was replaced in between is not handed out again."""
    for node in calls(graph, *MULTIPLY):
        for activated, up in orders(node, MULTIPLY):
            gate = activation_of(activated)
            if gate is None or not isinstance(up, Node) or only_user(up) is not node:
                continue
            if only_user(activated) is node and used_only_for(gate[0], activated):
                yield Gated(node, gate[0], up, gate[1])


class GatedPair(Pattern):
    stage: ClassVar[int] = 1  # before siblings are merged: of these two, this is the better way
    switch: ClassVar[str] = "fuse_gated_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for found in each_gated(graph):
            if _fits(found):
                args = (found.gate.args[0], found.up.args[0], found.up.args[1])
                replace(graph, found.node, gated_linear, args, found.activation | {"out_dtype": dtype_of(found.node)})


def _fits(found: Gated) -> bool:
    gate, up = found.gate, found.up
    if not all(each.target is linear and set(each.kwargs) == {"out_dtype"} for each in (gate, up)):
        return False
    modules: list[Any] = [each.args[0].meta[EXAMPLE] for each in (gate, up)]  # type: ignore[union-attr]
    weights = [weight_of(module) for module in modules]
    if not all(type(weight) is PackedParameter for weight in weights):
        return False
    return (
        gate.args[1] is up.args[1]
        and modules[0] is not modules[1]
        and weights[0].shape == weights[1].shape
        and dtype_of(found.node) == dtype_of(gate) == dtype_of(up)
    )


@step(lambda kwargs: f"gated linear ({kwargs['activation']})", writes_any_dtype=True)
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
        gates, ups = (linear(module, input, out_dtype=out_dtype) for module in (gate, up))
        return ACTIVATIONS[activation](gates, alpha, beta) * ups
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


def gated_call(
    input: Value,
    pair: Value,
    width: int,
    gate_bias: Value | Part | None,
    up_bias: Value | Part | None,
    activation: str,
    alpha: float,
    beta: float,
    out_dtype: torch.dtype,
) -> Call:
    """A chain's call of the operator."""
    arguments = (input, pair, width, gate_bias, up_bias, activation, float(alpha), float(beta), out_dtype)
    return Call("linear_gated", arguments, input, lambda rows: (*rows[:-1], width))


def _has_parameters(node: Node) -> bool:
    modules: Any = node.args[:2]
    return all(map(has_own_packed_weight, modules))


@chainable(gated_linear, where=_has_parameters)
def _gated_linear_call(
    seen: Seen,
    gate: PackedProduct,
    up: PackedProduct,
    input: Value,
    *,
    activation: str,
    alpha: float = 0.0,
    beta: float = 0.0,
    out_dtype: torch.dtype,
) -> Call | None:
    weights: list[Any] = [weight_of(gate), weight_of(up)]
    packed = all(type(weight) is PackedParameter for weight in weights)
    if not packed or not (are_pair(*weights) or pack_as_pair(*weights)):
        return None
    pair, _ = (seen.packed(module, "weight", module.weight.place.packed) for module in (gate, up))
    out_features = seen.attribute(gate, "out_features")
    biases = seen.parameter(gate, "bias"), seen.parameter(up, "bias")
    return gated_call(input, pair, out_features, *biases, activation, alpha, beta, out_dtype)
