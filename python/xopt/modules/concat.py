"""Tensors one after the other, as a link of chains: a class token before patches, a cache before what is new, images of
branches that meet. By itself it stays torch's.

Torch gives all parts the widest dtype; a step that can write any writes that one at once."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.parts import EXAMPLE
from xopt.modules.chain import Call, Seen, Shape, Value, chainable
from xopt.modules.pattern import (
    VIEWS,
    Pattern,
    argument,
    calls,
    dtype_of,
    is_call,
    only_reader,
    replace,
    shape_of,
    take_rounded,
    writes_any_dtype,
)
from xopt.modules.views import unsqueezed
from xopt.ops.concat import MOST_PARTS
from xopt.ops.fakes import COPIED, FLOATING

_CAT = (torch.cat, torch.concat, torch.concatenate)
_MOST_DIMS = 8  # that the operator knows


def _parts(node: Node) -> tuple[Node, ...]:
    """What a step joins; nothing where that cannot be told."""
    given = argument(node, 0, "tensors")
    known = isinstance(given, (tuple, list)) and all(isinstance(each, Node) for each in given)
    return tuple(given) if known else ()


class JoinedBefore(Pattern):
    """Features that are joined anew with each that comes (DenseNet), put behind what was joined before: two parts, and
    what the forward keeps need not wait to be read again."""

    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        joined: dict[tuple[tuple[Node, ...], int], Node] = {}
        for node in calls(graph, *_CAT):
            if not _joins(node):
                continue
            parts, dim = _parts(node), argument(node, 1, "dim", 0)
            count = next((count for count in range(len(parts) - 1, 1, -1) if (parts[:count], dim) in joined), 0)
            if count > 0:
                node.args, node.kwargs = ((joined[parts[:count], dim], *parts[count:]), dim), {}
            joined[parts, dim] = node


class WriteJoined(Pattern):
    stage: ClassVar[int] = 5
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *_CAT):
            for part in _parts(node):
                dtypes = {dtype_of(part), dtype_of(node)}
                if len(dtypes) == 2 and dtypes <= {*FLOATING} and not _is_written_so(part, node):
                    take_rounded(graph, node, part, dtype_of(node))


def _is_written_so(part: Node, node: Node) -> bool:
    """Whether what a part is, be it through views, can write the dtype of the whole, and does so now."""
    way: list[Any] = [part]
    while is_call(way[-1], *VIEWS, "flatten") and _is_read_once(way[-1]):
        way.append(way[-1].args[0])
    source = way[-1]
    if not writes_any_dtype(source) or not _is_read_once(source):
        return False
    source.kwargs = {**source.kwargs, "out_dtype": dtype_of(node)}
    for each in way:
        each.meta[EXAMPLE] = each.meta[EXAMPLE]._replace(dtype=dtype_of(node))
    return True


def _is_read_once(node: Node) -> bool:
    return only_reader(node) is not None


def _joins(node: Node) -> bool:
    return _joins_parts_with(node, len(shape_of(node)))


def _stacks(node: Node) -> bool:
    """Images, which lie otherwise, are quicker with torch."""
    return len(shape_of(node)) <= 4 and _joins_parts_with(node, len(shape_of(node)) - 1)


def _joins_parts_with(node: Node, dims: int) -> bool:
    parts, dim = _parts(node), argument(node, 1, "dim", 0)
    if not parts or len(node.args) > 2 or not node.kwargs.keys() <= {"tensors", "dim"} or type(dim) is not int:
        return False
    dtypes = {dtype_of(each) for each in (*parts, node)}
    alike = len(dtypes) == 1 and all(len(shape_of(each)) == dims for each in parts)
    return alike and 1 <= len(shape_of(node)) <= _MOST_DIMS and dtypes <= {*COPIED}


class JoinNothing(Pattern):
    """A cache's first keys, which are joined to nothing: a copy."""

    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "fuse_attention"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *_CAT):
            parts = _parts(node)
            if len(parts) == 2 and _is_nothing(parts[0]) and dtype_of(parts[0]) == dtype_of(parts[1]):
                replace(graph, node, copied, (parts[1],), {})


def _is_nothing(node: Node) -> bool:
    return is_call(node, torch.tensor) and shape_of(node) == (0,) and argument(node, 0, "data") == []


def copied(input: torch.Tensor) -> torch.Tensor:
    return torch.cat((input,))


@chainable(copied, where=lambda node: 1 <= len(shape_of(node)) <= _MOST_DIMS and dtype_of(node) in COPIED)
def _copied_call(seen: Seen, input: Value) -> Call:
    return Call("concat", ((input,), 0), input, lambda shape: shape)


@chainable(*_CAT, where=_joins, is_torchs=True)
def _concat_call(seen: Seen, tensors: tuple[Any, ...], dim: int = 0) -> Call | None:
    values = seen.values(tensors)
    return None if values is None else _joined(seen, values, dim)


@chainable(torch.stack, where=_stacks, is_torchs=True)
def _stack_call(seen: Seen, tensors: tuple[Any, ...], dim: int = 0) -> Call | None:
    values = seen.values(tensors)
    return None if values is None else _joined(seen, [seen.call(unsqueezed(value, dim)) for value in values], dim)


def _joined(seen: Seen, values: list[Value], dim: int) -> Call:
    while len(values) > MOST_PARTS:
        groups = [values[begin : begin + MOST_PARTS] for begin in range(0, len(values), MOST_PARTS)]
        values = [group[0] if len(group) == 1 else seen.call(_join_call(group, dim)) for group in groups]
    return _join_call(values, dim)


def _join_call(values: list[Value], dim: int) -> Call:
    def shape(first: Shape, *others: Shape) -> Shape:
        place = dim % len(first)
        return (*first[:place], first[place] + sum(each[place] for each in others), *first[place + 1 :])

    return Call("concat", (tuple(values), dim), values[0], shape, others=tuple(values[1:]))
