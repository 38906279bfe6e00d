"""Two tensors one after the other, as a link of chains: a class token before patches, a cache before what is new, an
image of a decoder's before the one from across. By itself it stays torch's.

Torch gives both parts the wider dtype; a step that can write any writes that one at once."""

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
    writes_any_dtype,
)
from xopt.ops.fakes import COPIED, FLOATING

_CAT = (torch.cat, torch.concat, torch.concatenate)
_MOST_DIMS = 8  # that the operator knows


def _parts(node: Node) -> tuple[Node, Node] | None:
    given = argument(node, 0, "tensors")
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2
    return tuple(given) if is_pair and all(isinstance(each, Node) for each in given) else None


class WriteJoined(Pattern):
    stage: ClassVar[int] = 5
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *_CAT):
            for part in _parts(node) or ():
                way: list[Any] = [part]
                while is_call(way[-1], *VIEWS, "flatten") and _is_read_once(way[-1]):
                    way.append(way[-1].args[0])
                source = way[-1]
                if dtype_of(source) == dtype_of(node) or not {dtype_of(source), dtype_of(node)} <= {*FLOATING}:
                    continue
                if writes_any_dtype(source) and _is_read_once(source):
                    source.kwargs = {**source.kwargs, "out_dtype": dtype_of(node)}
                    for each in way:
                        each.meta[EXAMPLE] = each.meta[EXAMPLE]._replace(dtype=dtype_of(node))


def _is_read_once(node: Node) -> bool:
    return only_reader(node) is not None


def _joins_two(node: Node) -> bool:
    parts, dim = _parts(node), argument(node, 1, "dim", 0)
    if parts is None or len(node.args) > 2 or not node.kwargs.keys() <= {"tensors", "dim"} or type(dim) is not int:
        return False
    dims = {len(shape_of(each)) for each in (*parts, node)}
    dtypes = {dtype_of(each) for each in (*parts, node)}
    return len(dims) == len(dtypes) == 1 and 1 <= min(dims) <= _MOST_DIMS and dtypes <= {*COPIED}


class JoinNothing(Pattern):
    """A cache's first keys, which are joined to nothing: a copy."""

    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "fuse_attention"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *_CAT):
            parts = _parts(node)
            if parts is not None and _is_nothing(parts[0]) and dtype_of(parts[0]) == dtype_of(parts[1]):
                replace(graph, node, copied, (parts[1],), {})


def _is_nothing(node: Node) -> bool:
    return is_call(node, torch.tensor) and shape_of(node) == (0,) and argument(node, 0, "data") == []


def copied(input: torch.Tensor) -> torch.Tensor:
    return torch.cat((input,))


@chainable(copied, where=lambda node: 1 <= len(shape_of(node)) <= _MOST_DIMS and dtype_of(node) in COPIED)
def _copied_call(seen: Seen, input: Value) -> Call:
    nothing = seen.call(Call("narrow", (input, 0, 0, 0), input, lambda shape: (0, *shape[1:])))
    return Call("concat", (nothing, input, 0), input, lambda shape: shape)


@chainable(*_CAT, where=_joins_two, is_torchs=True)
def _concat_call(seen: Seen, tensors: tuple[Any, Any], dim: int = 0) -> Call | None:
    first, second = map(seen.value, tensors)
    if first is None or second is None:
        return None

    def shape(first: Shape, second: Shape) -> Shape:
        place = dim % len(first)
        return (*first[:place], first[place] + second[place], *first[place + 1 :])

    return Call("concat", (first, second, dim), first, shape, others=(second,))
