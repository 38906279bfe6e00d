"""Rotary position embeddings of queries and keys, as models write them out: x cos + rotate_half(x) sin."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.record import EXAMPLE
from xopt.modules.pattern import ADD, MULTIPLY, Pattern, argument, calls, dtype_of, is_call, operands, shape_of, step

_rotary = torch.ops.xopt.rotary.default


@step("rotary")
def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotary(query, key, cos, sin)  # type: ignore[no-any-return]


class FindRotary(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_rotary"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        waiting: dict[tuple[Node, Node], tuple[Node, Node]] = {}
        for node in calls(graph, *ADD):
            found = _rotated(node)
            if found is None:
                continue
            x, angles = found
            if angles not in waiting:
                waiting[angles] = node, x
                continue
            _replace(graph, waiting.pop(angles), (node, x), angles)


def _rotated(node: Node) -> tuple[Node, tuple[Node, Node]] | None:
    """x, cos and sin of a sum that rotates all of x."""
    for plain, turned in _orders(node, ADD):
        for x, cos in _orders(plain, MULTIPLY):
            for half, sin in _orders(turned, MULTIPLY):
                angles = _angles(cos), _angles(sin)
                if _is_rotate_half(half, x) and None not in angles and dtype_of(node) == dtype_of(x):
                    depth = shape_of(x)[-1]
                    if len(shape_of(x)) == 4 and all(shape_of(angle)[-1] == depth for angle in angles):
                        return x, angles  # type: ignore[return-value]
    return None


def _orders(node: Any, targets: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    found = operands(node, targets)
    return [] if found is None else [found, found[::-1]]


def _angles(node: Any) -> Node | None:
    """The [batch, positions, depth] that a model broadcasts over heads."""
    if is_call(node, torch.unsqueeze, "unsqueeze") and argument(node, 1, "dim") == 1 and len(shape_of(node)) == 4:
        return node.args[0]  # type: ignore[no-any-return]
    return None


def _is_rotate_half(node: Any, x: Node) -> bool:
    if not is_call(node, torch.cat) or argument(node, 1, "dim", 0) != -1 or len(node.args[0]) != 2:
        return False
    second, first = node.args[0]
    if not is_call(second, operator.neg, torch.neg, "neg"):
        return False
    half = shape_of(x)[-1] // 2
    return _is_slice(first, x, None, half) and _is_slice(second.args[0], x, half, None)


def _is_slice(node: Any, x: Node, start: int | None, stop: int | None) -> bool:
    if not is_call(node, operator.getitem) or node.args[0] is not x:
        return False
    key = node.args[1]
    if not isinstance(key, tuple) or len(key) != 2 or key[0] is not Ellipsis or not isinstance(key[1], slice):
        return False
    return (_value(key[1].start), _value(key[1].stop), key[1].step) == (start, stop, None)


def _value(number: Any) -> Any:
    """A head's depth, which follows from the weights, is the same in all calls."""
    return number.meta.get(EXAMPLE) if isinstance(number, Node) else number


def _replace(graph: Graph, first: tuple[Node, Node], second: tuple[Node, Node], angles: tuple[Node, Node]) -> None:
    with graph.inserting_before(second[0]):
        both = graph.call_function(rotary, (first[1], second[1], *angles))
        for place, (node, _) in enumerate((first, second)):
            part = graph.call_function(operator.getitem, (both, place))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
    for node, _ in (first, second):
        graph.erase_node(node)
