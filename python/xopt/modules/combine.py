"""Sums, differences and products of two tensors that no product, convolution or norm has taken along, as links of
chains: an image times a factor for each channel (squeeze-and-excitation), branches that meet. By themselves they stay
torch's, but for those that are spread over columns or rows (biases of relative positions: SAM, MViT): there torch goes
by the element, and takes twice as long in fp32, five times in bf16."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.modules.activation import RELU, plain_activation
from xopt.modules.chain import Call, Seen, Shape, always, chainable
from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    SUBTRACT,
    Pattern,
    calls,
    dtype_of,
    only_user,
    operands,
    orders,
    replace,
    shape_of,
    step,
)
from xopt.ops.combine import HOW
from xopt.ops.fakes import FLOATING

_MOST_DIMS = 8  # that the operator knows
_FEW = 8192  # values, to which an operator of Python's costs more than torch's
_combine = torch.ops.xopt.combine.default


class ReluOfSum(Pattern):
    stage: ClassVar[int] = 6  # after all that takes a sum or an activation along
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *RELU):
            source = node.args[0]
            parts = operands(source, ADD)
            if parts is not None and _combines(source) and only_user(source) is node:
                replace(graph, node, relu_of_sum, parts, {})


class SpreadAnyway(Pattern):
    """`x * gate.expand_as(x)`: arithmetic spreads the gate by itself."""

    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, "expand_as"):
            if len(node.args) == 2 and all(_is_spread_by(user, node) for user in node.users):
                node.replace_all_uses_with(node.args[0])


def _is_spread_by(user: Any, expanded: Node) -> bool:
    """Whether it combines what is expanded with the tensor that it is expanded to, or with an activation of that."""
    for targets in (ADD, SUBTRACT, MULTIPLY):
        for one, other in orders(user, targets):
            alike = (other, other.args[0]) if plain_activation(other) is not None else (other,)
            if one is expanded and expanded.args[1] in alike and dtype_of(expanded) == dtype_of(other):
                return True
    return False


class SpreadOperand(Pattern):
    stage: ClassVar[int] = 7  # when nothing else has taken it along
    switch: ClassVar[str] = "fuse_attention"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for how, targets in (("add", ADD), ("sub", SUBTRACT), ("mul", MULTIPLY)):
            for node in calls(graph, *targets):
                if (
                    _combines(node)
                    and math.prod(shape_of(node)) >= _FEW
                    and any(map(_is_spread, node.args, (node,) * 2))
                ):
                    replace(graph, node, combined, node.args, {"how": how})


def _is_spread(part: Any, whole: Node) -> bool:
    """Whether it has one value for all of a row, or one row for all."""
    return any(one == 1 != other for one, other in _from_last(shape_of(part), shape_of(whole))[:2])


@step("")
def combined(first: torch.Tensor, second: torch.Tensor, *, how: str) -> torch.Tensor:
    if first.is_cpu and second.is_cpu and are_broadcast(first.shape, second.shape):
        return _combine(first, second, how)  # type: ignore[no-any-return]
    return HOW[how](first, second)


@step("")
def relu_of_sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.relu(first + second)


def _combines(node: Node) -> bool:
    parts = node.args
    if len(parts) != 2 or node.kwargs or not all(isinstance(part, Node) for part in parts):
        return False
    dtypes = {dtype_of(each) for each in (*parts, node)}
    return len(dtypes) == 1 and dtypes <= {*FLOATING} and 1 <= len(shape_of(node)) <= _MOST_DIMS


def _call_of(how: str = "", relu: bool = False) -> Callable[..., Call | None]:
    def tell(seen: Seen, first: Any, second: Any, *, how: str = how) -> Call | None:
        one, other = seen.value(first), seen.value(second)
        if one is None or other is None:
            return None
        return Call("combine", (one, other, how, relu), one, broadcast, others=(other,), fits=are_broadcast)

    return tell


def _from_last(*shapes: Shape) -> list[tuple[int, ...]]:
    return [*zip_longest(*map(reversed, shapes), fillvalue=1)]


def broadcast(*shapes: Shape) -> Shape:
    """The shape to which all of these are broadcast."""
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in reversed(_from_last(*shapes)))


def are_broadcast(*shapes: Shape) -> bool:
    return all(len({*sizes} - {1}) <= 1 for sizes in _from_last(*shapes))


chainable(*ADD, where=_combines, is_torchs=True)(_call_of("add", relu=False))
chainable(*SUBTRACT, where=_combines, is_torchs=True)(_call_of("sub", relu=False))
chainable(*MULTIPLY, where=_combines, is_torchs=True)(_call_of("mul", relu=False))
chainable(combined, where=always)(_call_of())
chainable(relu_of_sum, where=_combines, is_torchs=True)(_call_of("add", relu=True))
