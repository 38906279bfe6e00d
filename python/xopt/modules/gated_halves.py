"""A gate and what it gates as the halves of one linear layer's result (GEGLU, SwiGLU): one product, whose halves meet
in registers.

    hidden, gate = proj(x).chunk(2, dim=-1)
    hidden * gelu(gate)
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE
from xopt.modules.activation import ACTIVATIONS
from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.gated_linear import each_gated, gated_call, gated_product
from xopt.modules.linear import PackedProduct, has_own_packed_weight, linear
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.packed_together import pack_as_halves
from xopt.modules.pattern import Pattern, argument, dtype_of, is_call, only_user, replace, shape_of, step
from xopt.modules.told_sizes import is_size
from xopt.ops.chain import Part


class GatedHalves(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_gated_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for found in each_gated(graph):
            source = _halved(found.gate, found.up)
            if source is not None and _fits(source) and dtype_of(found.node) == dtype_of(source):
                kwargs = found.activation | {"gate": _place_of(found.gate), "out_dtype": dtype_of(found.node)}
                replace(graph, found.node, gated_halves, source.args, kwargs)


def _halved(gate: Any, up: Any) -> Any:
    """The product of which these are the two halves, along the last dimension."""
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem)) or up.args[0] is not gate.args[0]:
        return None
    if {_place_of(gate), _place_of(up)} != {0, 1}:
        return None
    if type(gate.args[1]) is int:
        split = gate.args[0]
        return split.args[0] if only_user(split.args[0]) is split else None
    source = gate.args[0]
    return source if _used_only_by(source, {gate, up}) else None


def _place_of(part: Any) -> int | None:
    """0 for the first half of a tensor's columns, 1 for the second, however it is taken."""
    key, whole = part.args[1], part.args[0]
    if type(key) is int:
        if key not in (0, 1) or not is_call(whole, torch.chunk, torch.split, "chunk", "split"):
            return None
        shape = shape_of(whole.args[0])
        last = shape and argument(whole, 2, "dim", 0) in (-1, len(shape) - 1)
        return key if last and shape_of(part)[-1] * 2 == shape[-1] else None
    if not isinstance(key, tuple) or len(key) != 2 or key[0] is not Ellipsis or not isinstance(key[1], slice):
        return None
    begin, end, step_size = key[1].start, key[1].stop, key[1].step
    if (
        step_size is not None
        or (begin, end).count(None) != 1
        or not _is_half_of(end if begin is None else begin, whole)
    ):
        return None
    return 0 if begin is None else 1


def _is_half_of(number: Any, whole: Any) -> bool:
    """Of the number of columns."""
    columns = shape_of(whole)[-1:]
    if type(number) is int:
        return columns == (2 * number,)
    if not columns or columns[0] % 2 or not is_call(number, operator.floordiv) or number.args[1] != 2:
        return False
    size = number.args[0]
    last = is_size(size) and argument(size, 1, "dim") in (-1, len(shape_of(whole)) - 1)
    return last and size.args[0] is whole


def _used_only_by(source: Any, parts: set[Any]) -> bool:
    """Whether nobody else reads it, nor asks for a size but for these."""
    return all(user in parts or (_is_number(user) and _used_only_by(user, parts)) for user in source.users)


def _is_number(node: Node) -> bool:
    return is_size(node) or is_call(node, operator.floordiv)


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
