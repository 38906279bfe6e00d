"""Linear layers that are fed the same tensor (query, key and value) as one product."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE
from xopt.modules.activation import activation_of
from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.computed_weight import weight_of
from xopt.modules.linear import PackedProduct, has_own_packed_weight, linear, linear_call
from xopt.modules.packed_parameter import PackedParameter, place_of
from xopt.modules.packed_together import are_one, pack_as_one
from xopt.modules.pattern import Pattern, all_of_weights, allow_copies, calls, dtype_of, step
from xopt.modules.product import told
from xopt.modules.views import narrowed

_linear = torch.ops.xopt.linear.default


class MergeSiblings(Pattern):
    stage: ClassVar[int] = 2
    switch: ClassVar[str] = "concat_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        activated = {found[0] for node in graph.nodes if (found := activation_of(node)) is not None}
        of_weights, siblings = all_of_weights(graph), dict[Node, list[Any]]()
        for node in calls(graph, linear):
            # A product takes an activation along itself, and what comes of weights alone is computed once.
            if node not in activated and node.args[1] not in of_weights:
                siblings.setdefault(node.args[1], []).append(node)
        for nodes in siblings.values():
            modules = [node.args[0].meta[EXAMPLE] for node in nodes]
            alike = all(set(node.kwargs) == {"out_dtype"} for node in nodes)
            if len(nodes) > 1 and alike and _fit(modules) and len({dtype_of(node) for node in nodes}) == 1:
                _merge(graph, nodes)


def _fit(modules: list[PackedProduct]) -> bool:
    weights = [weight_of(module) for module in modules]
    return (
        all(type(weight) is PackedParameter and weight.place.in_pair is None for weight in weights)
        and len({id(weight) for weight in weights}) == len(weights)
        and len({weight.dtype for weight in weights if weight is not None}) == 1
        and all(module.out_features % 32 == 0 for module in modules[:-1])
    )


def _merge(graph: Graph, nodes: list[Any]) -> None:
    modules, input = [node.args[0] for node in nodes], nodes[0].args[1]  # as it is now: it may have been merged itself
    with graph.inserting_before(nodes[0]):
        together = graph.call_function(merged_linear, (modules, input), {"out_dtype": dtype_of(nodes[0])})
        for place, node in enumerate(nodes):
            part = graph.call_function(operator.getitem, (together, place))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
            allow_copies(part)
    for node in nodes:
        graph.erase_node(node)


def _biases(modules: Sequence[PackedProduct]) -> tuple[torch.Tensor | None, ...]:
    return tuple(module._parameters["bias"] for module in modules)


def _joined(biases: Sequence[torch.Tensor | None], sizes: list[int]) -> torch.Tensor:
    """One bias of several, of which some may be missing."""
    like = next(each for each in biases if each is not None)
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([like.new_zeros(size) if each is None else each for each, size in pairs])


@step("merged linear")
def merged_linear(
    modules: list[PackedProduct], input: torch.Tensor, *, out_dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    weights: list[Any] = [weight_of(module) for module in modules]
    if not all(type(weight) is PackedParameter for weight in weights):
        return tuple(linear(module, input, out_dtype=out_dtype) for module in modules)
    if not are_one(weights) and not pack_as_one(weights):
        return tuple(linear(module, input, out_dtype=out_dtype) for module in modules)
    biases = _biases(modules)
    sizes = [module.out_features for module in modules]
    bias = _joined(biases, sizes) if any(each is not None for each in biases) else None
    together = _linear(input, weights[0].place.packed, sum(sizes), bias, **told({}, input, out_dtype))
    return together.split_with_sizes(sizes, -1)  # type: ignore[no-any-return]


def _has_parameters(node: Node) -> bool:
    modules: Any = node.args[0]
    return all(map(has_own_packed_weight, modules))


@chainable(merged_linear, where=_has_parameters, has_parts=True)
def _merged_linear_calls(
    seen: Seen, modules: Sequence[PackedProduct], input: Value, *, out_dtype: torch.dtype
) -> list[Call] | None:
    weights: list[Any] = [weight_of(module) for module in modules]
    if any(place_of(weight) is None for weight in weights):
        return None
    alone = not are_one(weights) and not pack_as_one(weights)
    alone |= any(bias is not None and bias.is_inference() for bias in _biases(modules))  # nobody counts their changes
    packed = [seen.packed(module, "weight", module.weight.place.packed) for module in modules]  # all, to watch them
    sizes = [seen.attribute(module, "out_features") for module in modules]
    if alone:
        own = [(seen.parameter(module, "bias"), weight_of(module).place.first_column) for module in modules]
        return [
            linear_call(input, weight, size, bias, out_dtype, first_column)
            for weight, size, (bias, first_column) in zip(packed, sizes, own, strict=True)
        ]
    biases = [seen.tensor(module, "bias") for module in modules]
    bias = seen.own(_joined(biases, sizes)) if any(each is not None for each in biases) else None
    together = seen.call(linear_call(input, packed[0], sum(sizes), bias, out_dtype))
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [narrowed(together, start, size) for start, size in zip(starts, sizes, strict=True)]
