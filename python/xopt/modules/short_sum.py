"""Sums over a dimension of two to four, as sums of its parts: what the splits or paths of a convolution meet in
(ResNeSt, SKNet). Of images whose channels are last torch would walk the memory by the element, and of paths that were
stacked to be added make a copy."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    Pattern,
    argument,
    calls,
    described,
    dtype_of,
    is_call,
    operands,
    put_in_place,
    shape_of,
)
from xopt.modules.softmax import SOFTMAX
from xopt.ops.fakes import FLOATING

_MOST_PARTS = 4
_ALL = slice(None)


class ShortSum(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, "sum", torch.sum):
            found = _summed(node)
            if found is None:
                continue
            source, dim, count = found
            with graph.inserting_before(node):
                total = _part(graph, source, dim, 0)
                for place in range(1, count):
                    total = described(graph.call_function(operator.add, (total, _part(graph, source, dim, place))))
            put_in_place(graph, node, total)


def _summed(node: Node) -> tuple[Node, int, int] | None:
    """What a step sums, along which dimension, and how many that are."""
    source: Any = argument(node, 0, "input")
    dim, dims = argument(node, 1, "dim"), len(shape_of(source))
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    plain = len(node.args) <= 2 and node.kwargs.keys() <= {"input", "dim"} and type(dim) is int
    if not plain or dims < 2 or dtype_of(source) not in FLOATING or dtype_of(source) != dtype_of(node):
        return None
    count = _known_size(source, dim % dims)
    most = _MOST_PARTS if dtype_of(source) == torch.float32 else 2  # sums of more would be rounded more often
    fits = count is not None and 2 <= count <= most and dim % dims < dims - 1
    return (source, dim % dims, count) if fits and count is not None else None


def _known_size(node: Any, dim: int) -> int | None:
    """Along a dimension, if it is the same in all calls."""
    if is_call(node, "view", "reshape", torch.reshape):
        listed = len(node.args) == 2 and isinstance(node.args[1], (tuple, list))
        sizes: Any = node.args[1] if listed else node.args[1:]
        size = sizes[dim] if len(sizes) == len(shape_of(node)) else None
        return size if type(size) is int and size > 0 else None
    if _stacked(node, dim) is not None:
        return len(_stacked(node, dim) or ())
    if is_call(node, *SOFTMAX):
        return _known_size(node.args[0], dim)
    if _factors(node, dim) is not None:
        return shape_of(node)[dim]
    return None


def _stacked(node: Any, dim: int) -> tuple[Any, ...] | None:
    if not is_call(node, torch.stack) or argument(node, 1, "dim", 0) not in (dim, dim - len(shape_of(node))):
        return None
    given = argument(node, 0, "tensors")
    alike = isinstance(given, (tuple, list)) and all(dtype_of(each) == dtype_of(node) for each in given)
    return tuple(given) if alike else None


def _factors(node: Any, dim: int) -> tuple[Any, tuple[Any, Any]] | None:
    """A product's or a sum's function, and its operands, which both have the dimension."""
    for targets in (ADD, MULTIPLY):
        found = operands(node, targets)
        if found is None or any(len(shape_of(each)) != len(shape_of(node)) for each in found):
            continue
        sizes = {_known_size(each, dim) for each in found}
        dtypes = {dtype_of(each) for each in (*found, node)}
        if sizes == {shape_of(node)[dim]} and len(dtypes) == 1:
            return targets[0], found
    return None


def _part(graph: Graph, node: Any, dim: int, place: int) -> Node:
    """Of the dimension, one."""
    stacked, factors = _stacked(node, dim), _factors(node, dim)
    if stacked is not None:
        part: Node = stacked[place]
        return part
    if factors is not None:
        parts = [_part(graph, each, dim, place) for each in factors[1]]
        return described(graph.call_function(factors[0], tuple(parts)))
    return described(graph.call_function(operator.getitem, (node, (*(_ALL,) * dim, place))))
