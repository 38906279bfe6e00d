"""Rotary position embeddings of queries and keys, as models write them out: x cos + turned(x) sin.

    halves        turned(x) = cat(-x[half:], x[:half])                        Llama
    interleaved   turned(x) = stack(-x[1::2], x[::2]) flattened               GPT-J, Flux

x may be the first columns of a head, whose others are put behind the result; it may have its heads before its positions
or behind them; and all of it may be done in fp32 between casts. Angles may be those of one text for all (timm's vision
transformers: a matrix). The kernel does each of these in one pass.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.late import EFFECT
from xopt.graph.record import EXAMPLE
from xopt.graph.steps import expect
from xopt.modules.chain import Call, Seen, Shape, Value, always, chainable
from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    Pattern,
    argument,
    calls,
    described,
    dtype_of,
    is_call,
    is_cast,
    only_user,
    orders,
    shape_of,
    step,
    without_casts,
)
from xopt.modules.told_sizes import is_size
from xopt.modules.views import squeezed, transposed
from xopt.ops.fakes import FLOATING

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


class _Turn(NamedTuple):
    """One tensor that is rotated."""

    x: Node
    result: Node
    cos: Node
    sin: Node
    heads: int
    interleaved: bool


class FindRotary(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_rotary"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        waiting: list[_Turn] = []
        for node in calls(graph, *ADD):
            turn = _turn_of(node)
            if turn is None:
                continue
            partner = next((other for other in waiting if _belong_together(other, turn)), None)
            if partner is None:
                waiting.append(turn)
            elif _replace(graph, _whole(partner), _whole(turn)) or _replace(graph, partner, turn):
                waiting.remove(partner)


def _turn_of(node: Node) -> _Turn | None:
    """What a sum rotates, if it is one that does."""
    for plain, turned in orders(node, ADD):
        for x, cos in orders(plain, MULTIPLY):
            for other, sin in orders(turned, MULTIPLY):
                interleaved = _turned(other, x)
                if interleaved is None:
                    continue
                found = _result(node, x, interleaved, cos, sin)
                if found is not None:
                    return found
    return None


def _result(node: Node, x: Any, interleaved: bool, cos: Any, sin: Any) -> _Turn | None:
    source = without_casts(x)
    heads = _heads_dim(cos, x)
    if len(shape_of(x)) != 4 or heads is None or _heads_dim(sin, x) != heads or dtype_of(source) not in FLOATING:
        return None
    if shape_of(cos)[-1] != shape_of(x)[-1] or shape_of(sin)[-1] != shape_of(x)[-1] or shape_of(x)[-1] % 2:
        return None
    if dtype_of(node) not in (dtype_of(source), torch.float32) or dtype_of(x) not in (dtype_of(source), torch.float32):
        return None
    if is_cast(only_user(node)) and dtype_of(only_user(node)) == dtype_of(source):  # done in fp32, and cast back
        node = only_user(node)
    return _Turn(source, node, cos, sin, heads, interleaved) if dtype_of(node) == dtype_of(source) else None


# ---- What is turned -------------------------------------------------------------------------------------------------


def _turned(node: Any, x: Any) -> bool | None:
    """Whether `node` is x turned in pairs of neighbours (True) or by halves (False); None: neither."""
    node, source = without_casts(node), without_casts(x)
    if is_call(node, torch.cat) and argument(node, 1, "dim", 0) == -1 and _is_pair(node):
        second, first = node.args[0]
        half = shape_of(x)[-1] // 2
        halves = slice(None, half), slice(half, None)
        return False if _are_parts(first, second, source, *halves) else None
    pairs = len(shape_of(source)) - 1  # the dimension where they are, and whole columns
    flat = is_call(node, torch.flatten, "flatten") and argument(node, 1, "start_dim", 0) in (-2, pairs)
    if flat or (is_call(node, torch.reshape, "reshape", "view") and _is_shape_of(node, source)):
        stacked = node.args[0]
        if is_call(stacked, torch.stack) and argument(stacked, 1, "dim", 0) == -1 and _is_pair(stacked):
            second, first = stacked.args[0]
            return True if _are_parts(first, second, source, slice(None, None, 2), slice(1, None, 2)) else None
    return None


def _is_shape_of(view: Node, source: Node, last: tuple[int, ...] = ()) -> bool:
    """Whether a view has the sizes of another tensor in all calls, or these numbers in place of the last one."""
    sizes: Any = view.args[1] if isinstance(view.args[1], (tuple, list)) else view.args[1:]
    own, dims = sizes[: len(sizes) - len(last)], len(shape_of(source))
    if len(own) != (dims - 1 if last else dims) or tuple(sizes[len(own) :]) != last:
        return False
    return all(
        is_size(size) and without_casts(size.args[0]) is source and argument(size, 1, "dim") % dims == dim
        for dim, size in enumerate(own)
    )


def _is_pair(node: Node) -> bool:
    return isinstance(node.args[0], (tuple, list)) and len(node.args[0]) == 2


def _are_parts(first: Any, negated: Any, source: Node, of_first: slice, of_second: slice) -> bool:
    if not is_call(negated, operator.neg, torch.neg, "neg"):
        return False
    return _is_columns(first, source, of_first) and _is_columns(negated.args[0], source, of_second)


def _columns(node: Any) -> slice | None:
    """The columns that a step takes of all rows, with plain numbers."""
    if not is_call(node, operator.getitem) or not isinstance(node.args[1], tuple):
        return None
    *rows, columns = node.args[1]
    if rows != [Ellipsis] and rows != [slice(None)] * (len(shape_of(node)) - 1):
        return None
    if not isinstance(columns, slice):
        return None
    start, stop, step_size = (_value(number) for number in (columns.start, columns.stop, columns.step))
    return slice(start or None, stop, step_size)


def _is_columns(node: Any, source: Node, columns: slice) -> bool:
    if is_call(node, operator.getitem) and is_call(node.args[0], torch.chunk, "chunk"):
        chunks = node.args[0]
        halves = argument(chunks, 1, "chunks") == 2 and argument(chunks, 2, "dim", 0) in (-1, len(shape_of(source)) - 1)
        half = shape_of(source)[-1] // 2
        part = (slice(None, half), slice(half, None))[node.args[1]] if halves and type(node.args[1]) is int else None
        return part == columns and without_casts(chunks.args[0]) is source
    if _unbound(node, source) == columns:
        return True
    return _columns(node) == columns and without_casts(node.args[0]) is source


def _unbound(node: Any, source: Node) -> slice | None:
    """The columns that a part of a view by pairs or by halves has, whose parts are taken along one dimension."""
    unbound: Any = node.args[0] if is_call(node, operator.getitem) and type(node.args[1]) is int else None
    if not is_call(unbound, torch.unbind, "unbind") or not is_call(unbound.args[0], torch.reshape, "reshape", "view"):
        return None
    view, dim, part = unbound.args[0], argument(unbound, 1, "dim", 0), node.args[1]
    if without_casts(view.args[0]) is not source or part not in (0, 1):
        return None
    dims, half = len(shape_of(view)), shape_of(source)[-1] // 2
    if dim in (-1, dims - 1) and _is_shape_of(view, source, (-1, 2)):
        return slice(part or None, None, 2)
    by_halves = dim in (-2, dims - 2) and _is_shape_of(view, source, (2, -1))
    return (slice(None, half), slice(half, None))[part] if by_halves else None


def _value(number: Any) -> Any:
    """A head's depth, which follows from the weights, is the same in all calls."""
    return number.meta.get(EXAMPLE) if isinstance(number, Node) else number


def _whole(turn: _Turn) -> _Turn:
    """The rotation of a whole head, where only its first columns are turned and the others put behind them."""
    columns, joined = _columns(turn.x), only_user(turn.result)
    kept = None if columns is None else slice(columns.stop, None)
    if kept is None or columns != slice(None, shape_of(turn.x)[-1]) or not is_call(joined, torch.cat):
        return turn
    source = turn.x.args[0]
    if argument(joined, 1, "dim", 0) != -1 or not _is_pair(joined) or joined.args[0][0] is not turn.result:
        return turn
    rest = joined.args[0][1]
    if not isinstance(source, Node) or not is_call(rest, operator.getitem) or rest.args[0] is not source:
        return turn
    return turn._replace(x=source, result=joined) if _columns(rest) == kept else turn


# ---- Angles ---------------------------------------------------------------------------------------------------------


def _heads_dim(angles: Any, x: Any) -> int | None:
    """The dimension of heads, over which angles are the same."""
    if len(shape_of(angles)) == 2:
        return 1 if shape_of(angles) == shape_of(x)[2:] and dtype_of(angles) in FLOATING else None
    return _broadcast_dim(angles)


def _broadcast_dim(node: Any) -> int | None:
    """The dimension of angles that a model has added for heads, behind whatever it does to columns."""
    if len(shape_of(node)) != 4:
        return None
    while True:
        if is_cast(node) or is_call(node, torch.repeat_interleave, "repeat_interleave") or _columns(node) is not None:
            node = node.args[0]
        else:
            break
    if is_call(node, torch.unsqueeze, "unsqueeze") and len(shape_of(node)) == 4:
        dim = argument(node, 1, "dim")
        return dim % 4 if dim in (1, 2, -2, -3) else None
    if is_call(node, operator.getitem) and isinstance(node.args[1], tuple) and len(shape_of(node)) == 4:
        key, rest = list(node.args[1]), slice(None)
        for dim in (1, 2):
            of_each_text: list[Any] = [rest, rest, rest]
            of_all_texts: list[Any] = [None, rest, rest]
            for whole in (of_each_text, of_all_texts):
                whole.insert(dim, None)
                if key == whole[: len(key)] and len(key) > dim:
                    return dim
    return None


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


def _belong_together(one: _Turn, other: _Turn) -> bool:
    alike = _is_written_alike(one.cos, other.cos) and _is_written_alike(one.sin, other.sin)
    return alike and (one.heads, one.interleaved) == (other.heads, other.interleaved)


def _replace(graph: Graph, first: _Turn, second: _Turn) -> bool:
    """Whether both could be put together: what comes of the first is moved behind the second, unless that needs it."""
    if shape_of(first.x)[-1] != shape_of(second.x)[-1] or dtype_of(first.x) != dtype_of(second.x):
        return False
    between = _between(graph, first.result, second.result)
    if between is None:
        return False
    with graph.inserting_before(second.result):
        options: Any = {"heads": first.heads, "interleaved": first.interleaved}
        angles = (_of_all_texts(graph, first.cos), _of_all_texts(graph, first.sin))
        both = graph.call_function(rotary, (first.x, second.x, *angles), options)
        for place, turn in enumerate((first, second)):
            part = graph.call_function(operator.getitem, (both, place))
            part.meta.update(turn.result.meta)
            turn.result.replace_all_uses_with(part)
    behind = second.result
    for node in between:
        behind.append(node)
        behind = node
    for turn in (first, second):
        graph.erase_node(turn.result)
    return True


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


def _of_all_texts(graph: Graph, angles: Node) -> Node:
    """[positions, columns] as [1, 1, positions, columns]."""
    if len(shape_of(angles)) == 4:
        return angles
    return described(graph.call_method("unsqueeze", (described(graph.call_method("unsqueeze", (angles, 0))), 0)))
