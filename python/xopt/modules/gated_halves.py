"""A gate and what it gates as the halves of one linear layer's result (GEGLU, SwiGLU): one product, whose halves meet
in registers.

    hidden, gate = proj(x).chunk(2, dim=-1)
    hidden * gelu(gate)
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch.fx import Graph

from xopt.graph.record import EXAMPLE
from xopt.modules.activation import ACTIVATIONS
from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.gated_linear import each_gated, gated_call, gated_product
from xopt.modules.linear import PackedProduct, has_own_packed_weight, linear
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.packed_together import pack_as_halves
from xopt.modules.pattern import Pattern, argument, dtype_of, is_call, only_user, replace, shape_of, step
from xopt.ops.chain import Part


class GatedHalves(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_gated_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for found in each_gated(graph):
            source = _halved(found.gate, found.up)
            if source is not None and _fits(source) and dtype_of(found.node) == dtype_of(source):
                kwargs = found.activation | {"gate": found.gate.args[1], "out_dtype": dtype_of(found.node)}
                replace(graph, found.node, gated_halves, source.args, kwargs)


def _halved(gate: Any, up: Any) -> Any:
    """The product of which these are the two halves, along the last dimension."""
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem)):
        return None
    split, places = gate.args[0], {gate.args[1], up.args[1]}
    if up.args[0] is not split or places != {0, 1} or not is_call(split, torch.chunk, torch.split, "chunk", "split"):
        return None
    source = split.args[0]
    shape, dim = shape_of(source), argument(split, 2, "dim", 0)
    if not shape or dim not in (-1, len(shape) - 1) or shape_of(gate)[-1] * 2 != shape[-1]:
        return None
    return source if only_user(source) is split else None


def _fits(source: Any) -> bool:
    if source.target is not linear or set(source.kwargs) != {"out_dtype"}:
        return False
    return type(source.args[0].meta[EXAMPLE]._parameters["weight"]) is PackedParameter


@step(lambda kwargs: f"gated halves ({kwargs['activation']})")
def gated_halves(
    module: PackedProduct,
    input: torch.Tensor,
    *,
    gate: int,
    activation: str,
    alpha: float = 0.0,
    beta: float = 0.0,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    weight: Any = module._parameters["weight"]
    if type(weight) is not PackedParameter or not pack_as_halves(weight, gate):
        halves = linear(module, input, out_dtype=out_dtype).chunk(2, -1)
        return ACTIVATIONS[activation](halves[gate], alpha, beta) * halves[1 - gate]
    bias = module._parameters["bias"]
    biases = (None, None) if bias is None else bias.chunk(2)
    return gated_product(  # type: ignore[no-any-return]
        input,
        weight.place.packed,
        module.out_features // 2,
        biases[gate],
        biases[1 - gate],
        activation=activation,
        alpha=alpha,
        beta=beta,
        out_dtype=out_dtype,
    )


@chainable(gated_halves, where=lambda node: has_own_packed_weight(node.args[0]))  # type: ignore[arg-type]
def _gated_halves_call(
    seen: Seen,
    module: PackedProduct,
    input: Value,
    *,
    gate: int,
    activation: str,
    alpha: float = 0.0,
    beta: float = 0.0,
    out_dtype: torch.dtype,
) -> Call | None:
    weight: Any = module._parameters["weight"]
    if type(weight) is not PackedParameter or not pack_as_halves(weight, gate):
        return None
    half = seen.attribute(module, "out_features") // 2
    packed = seen.packed(module, "weight", weight.place.packed)
    bias = seen.parameter(module, "bias")
    halves: Any = (None, None) if bias is None else (Part(bias.place, 0, half), Part(bias.place, half, 2 * half))
    return gated_call(input, packed, half, halves[gate], halves[1 - gate], activation, alpha, beta, out_dtype)
