"""Rotary position embeddings of queries and keys, as models write them out: x cos + turned(x) sin.

    halves        turned(x) = cat(-x[half:], x[:half])                        Llama
    interleaved   turned(x) = stack(-x[1::2], x[::2]) flattened               GPT-J, Flux
    in parts      x[::2] cos - x[1::2] sin, then x[::2] sin + x[1::2] cos     Wan
    complex       view_as_complex(pairs of x) times complex angles            Qwen-Image

x may be the first columns of a head, whose others are put behind the result; it may have its heads before its positions
or behind them, or none yet (LTX); and all of it may be done in fp32 between casts. Angles may be those of one text for
all (timm's vision transformers: a matrix). The kernel does each of these in one pass.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.late import EFFECT
from xopt.graph.steps import expect, with_part
from xopt.modules.chain import Call, Seen, Shape, Value, always, chainable
from xopt.modules.pattern import (
    ADD,
    Pattern,
    argument,
    calls,
    described,
    dtype_of,
    is_call,
    only_user,
    shape_of,
    step,
)
from xopt.modules.rotary_forms import Turn, columns_of, is_pair, turn_of
from xopt.modules.views import squeezed, transposed

_rotary = torch.ops.xopt.rotary.default


@step("rotary")
def rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, heads: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """`heads`: the dimension of query and key that these are, 1 or 2, and over which the angles are broadcast."""
    cos, sin = cos.squeeze(heads), sin.squeeze(heads)
    if heads == 1:
        return _rotary(query, key, cos, sin, interleaved=interleaved)  # type: ignore[no-any-return]
    query, key = _rotary(query.transpose(1, 2), key.transpose(1, 2), cos, sin, interleaved=interleaved)
    return query.transpose(1, 2), key.transpose(1, 2)


@chainable(rotary, where=always, has_parts=True)
def _rotary_calls(
    seen: Seen, query: Value, key: Value, cos: Value, sin: Value, *, heads: int, interleaved: bool
) -> Call | list[Call]:
    cos, sin = seen.call(squeezed(cos, heads)), seen.call(squeezed(sin, heads))
    if heads == 2:
        query, key = seen.call(transposed(query, 1, 2)), seen.call(transposed(key, 1, 2))

    def shape(query: Shape, key: Shape) -> Shape:
        return query

    def second(query: Shape, key: Shape) -> Shape:
        return key

    both = Call("rotary", (query, key, cos, sin, interleaved), query, shape, others=(key,), second=second)
    if heads == 1:
        return both
    turned = seen.call(both)
    return [transposed(turned, 1, 2), transposed(turned._replace(part=1), 1, 2)]


class FindRotary(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_rotary"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        waiting: list[Turn] = []
        for node in calls(graph, *ADD, with_part, torch.view_as_real):
            turn = turn_of(node)
            if turn is None:
                continue
            partner = next((other for other in waiting if _belong_together(other, turn)), None)
            if partner is None:
                waiting.append(turn)
            elif _replace(graph, _whole(partner), _whole(turn)) or _replace(graph, partner, turn):
                waiting.remove(partner)


def _whole(turn: Turn) -> Turn:
    """The rotation of a whole head, where only its first columns are turned and the others put behind them."""
    columns, joined = columns_of(turn.x), only_user(turn.result)
    kept = None if columns is None else slice(columns.stop, None)
    if kept is None or columns != slice(None, shape_of(turn.x)[-1]) or not is_call(joined, torch.cat):
        return turn
    source = turn.x.args[0]
    if argument(joined, 1, "dim", 0) != -1 or not is_pair(joined) or joined.args[0][0] is not turn.result:
        return turn
    rest = joined.args[0][1]
    if not isinstance(source, Node) or not is_call(rest, operator.getitem) or rest.args[0] is not source:
        return turn
    return turn._replace(x=source, result=joined) if columns_of(rest) == kept else turn


def _is_written_alike(one: Any, other: Any) -> bool:
    """Whether two steps compute the same from the same: models broadcast angles for query and key apart."""
    if one is other:
        return True
    if not isinstance(one, Node) or not isinstance(other, Node):
        return type(one) is type(other) and bool(one == other)
    if one.target != other.target or not is_call(one, one.target) or one.kwargs != other.kwargs:
        return False
    if one.target is getattr or (one.op == "call_method" and dtype_of(one.args[0]) is None):
        return False  # it reads an object, which may have changed in between
    return _are_written_alike(one.args, other.args)


def _are_written_alike(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_are_written_alike, one, other))
    if isinstance(one, slice) and isinstance(other, slice):
        return _are_written_alike((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return _is_written_alike(one, other)


# ---- Both -----------------------------------------------------------------------------------------------------------


def _belong_together(one: Turn, other: Turn) -> bool:
    alike = _is_written_alike(one.cos, other.cos) and _is_written_alike(one.sin, other.sin)
    return alike and (one.heads, one.interleaved, one.angles) == (other.heads, other.interleaved, other.angles)


def _replace(graph: Graph, first: Turn, second: Turn) -> bool:
    """Whether both could be put together: what comes of the first is moved behind the second, unless that needs it."""
    if shape_of(first.x)[-1] != shape_of(second.x)[-1] or dtype_of(first.x) != dtype_of(second.x):
        return False
    between = _between(graph, first.result, second.result)
    if between is None:
        return False
    with graph.inserting_before(second.result):
        options: Any = {"heads": first.heads or 1, "interleaved": first.interleaved}
        angles = [_angles(graph, first, each, part) for part, each in enumerate((first.cos, first.sin))]
        x = [_with_heads(graph, turn) for turn in (first, second)]
        both = graph.call_function(rotary, (*x, *angles), options)
        for place, turn in enumerate((first, second)):
            part = graph.call_function(operator.getitem, (both, place))
            if not turn.heads:
                part.meta.update(x[place].meta)
                part = graph.call_method("squeeze", (part, 1))
            part.meta.update(turn.result.meta)
            turn.result.replace_all_uses_with(part)
    behind = second.result
    for node in between:
        behind.append(node)
        behind = node
    for turn in (first, second):
        graph.erase_node(turn.result)
    return True


def _with_heads(graph: Graph, turn: Turn) -> Node:
    return turn.x if turn.heads else described(graph.call_method("unsqueeze", (turn.x, 1)))


def _between(graph: Graph, first: Node, second: Node) -> list[Node] | None:
    """The steps before the second that are made of the first; None: they cannot wait for it."""
    made: set[Node] = {first}
    found: list[Node] = []
    for node in graph.nodes:
        if node is second:
            return None if made.intersection(node.all_input_nodes) else found
        if made.intersection(node.all_input_nodes):
            if EFFECT in node.meta or node.target is expect:
                return None
            made.add(node)
            found.append(node)
    return None


def _angles(graph: Graph, turn: Turn, angles: Node, part: int) -> Node:
    """Cosines or sines, which part 0 and 1 of complex numbers are, as the kernel has them: [positions, columns] as
    [1, 1, positions, columns]; those of pairs for each of two columns; and rows without heads as those of one."""
    if turn.angles == "complex":
        columns: Any = (Ellipsis, part)
        numbers = described(graph.call_function(torch.view_as_real, (angles,)))
        angles = described(graph.call_function(operator.getitem, (numbers, columns)))
    if turn.angles != "of columns":
        angles = described(graph.call_method("repeat_interleave", (angles, 2, -1)))
    if not turn.heads:
        angles = described(graph.call_method("unsqueeze", (angles, 1)))
    while len(shape_of(angles)) < 4:
        angles = described(graph.call_method("unsqueeze", (angles, 0)))
    return angles
