"""How models write a rotation out: what of it is turned, and by which angles. See rotary.py."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from xopt.graph.record import EXAMPLE
from xopt.graph.steps import with_part
from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    SUBTRACT,
    argument,
    dtype_of,
    is_call,
    is_cast,
    only_user,
    operands,
    orders,
    shape_of,
    without_casts,
)
from xopt.modules.told_sizes import is_size
from xopt.ops.fakes import FLOATING

_FIRST_OF_PAIRS, _SECOND_OF_PAIRS = slice(None, None, 2), slice(1, None, 2)


class Turn(NamedTuple):
    """One tensor that is rotated."""

    x: Node
    result: Node
    cos: Node
    sin: Node
    heads: int
    """The dimension that these are; 0: x has none yet, and angles for all of its columns (LTX)."""
    interleaved: bool
    angles: str = "of columns"
    """Or "of pairs", one for both of its columns; or "complex", as `cos` and `sin` both."""


def turn_of(node: Node) -> Turn | None:
    """What a step rotates, if it is the last of those that do."""
    if is_call(node, with_part):
        return _turn_in_parts(node)
    return _turn_of_complex(node) if is_call(node, torch.view_as_real) else _turn_of_sum(node)


def _turn_of_complex(product: Node) -> Turn | None:
    """Pairs as complex numbers, which are multiplied by those of the angles (Qwen-Image, Llama 4)."""
    flat: Any = only_user(product)
    if not is_call(flat, torch.flatten, "flatten") or argument(flat, 1, "start_dim", 0) not in (-2, 3):
        return None
    last = only_user(flat)
    if not is_cast(last):
        return None
    for number, angles in orders(product.args[0], MULTIPLY):
        pairs: Any = number.args[0] if is_call(number, torch.view_as_complex) else None
        x: Any = without_casts(pairs.args[0]) if isinstance(pairs, Node) and pairs.args else None
        if len(shape_of(x)) != 4 or dtype_of(x) not in FLOATING or not _splits_columns(pairs, x, (-1, 2)):
            continue
        fits = dtype_of(last) == dtype_of(x) and dtype_of(angles) == torch.complex64
        heads = _heads_of_complex(angles) if fits and shape_of(angles)[-1] * 2 == shape_of(x)[-1] else None
        if heads is not None:
            return Turn(x, last, angles, angles, heads, True, "complex")
    return None


def _heads_of_complex(angles: Any) -> int | None:
    of_all_texts = len(shape_of(angles)) == 3 and is_call(angles, "unsqueeze", torch.unsqueeze)
    if of_all_texts:  # [positions, 1, pairs]
        return 2 if argument(angles, 1, "dim") in (1, -2) else None
    return _broadcast_dim(angles)


def _turn_of_sum(node: Node) -> Turn | None:
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


def _result(node: Node, x: Any, interleaved: bool, cos: Any, sin: Any) -> Turn | None:
    source = without_casts(x)
    heads = _heads_dim(cos, x)
    if heads is None or _heads_dim(sin, x) != heads or dtype_of(source) not in FLOATING:
        return None
    if shape_of(cos)[-1] != shape_of(x)[-1] or shape_of(sin)[-1] != shape_of(x)[-1] or shape_of(x)[-1] % 2:
        return None
    if dtype_of(node) not in (dtype_of(source), torch.float32) or dtype_of(x) not in (dtype_of(source), torch.float32):
        return None
    if is_cast(only_user(node)) and dtype_of(only_user(node)) == dtype_of(source):  # done in fp32, and cast back
        node = only_user(node)
    return Turn(source, node, cos, sin, heads, interleaved) if dtype_of(node) == dtype_of(source) else None


def _turn_in_parts(last: Node) -> Turn | None:
    """The first and then the second of all pairs, each written to its place in a blank tensor (Wan)."""
    first: Any = last.args[0]
    if not is_call(first, with_part) or only_user(first) is not last:
        return None
    blank = first.args[0]
    if not is_call(blank, torch.empty_like) or blank.kwargs or only_user(blank) is not first:
        return None
    keys = [_columns_in(write.args[1], blank) for write in (first, last)]
    found = _pairs(blank.args[0], first.args[2], last.args[2]) if keys == [_FIRST_OF_PAIRS, _SECOND_OF_PAIRS] else None
    if found is None:
        return None
    x, (cos, sin) = blank.args[0], found
    heads, half = _heads_dim(cos, x), shape_of(x)[-1] // 2
    fits = heads and heads == _heads_dim(sin, x) and shape_of(cos)[-1] == shape_of(sin)[-1] == half
    if not fits or dtype_of(x) not in FLOATING or dtype_of(last) != dtype_of(x):
        return None
    return Turn(x, last, cos, sin, heads, True, "of pairs")  # type: ignore[arg-type]


def _pairs(x: Any, one: Any, other: Any) -> tuple[Any, Any] | None:
    """Cosine and sine, where `one` is x[::2] cos - x[1::2] sin, and `other` x[::2] sin + x[1::2] cos."""
    difference = operands(one, SUBTRACT) or (None, None)
    for first, cos in orders(difference[0], MULTIPLY):
        for second, sin in orders(difference[1], MULTIPLY):
            if not _is_columns(first, x, _FIRST_OF_PAIRS) or not _is_columns(second, x, _SECOND_OF_PAIRS):
                continue
            wanted = ((first, sin), (second, cos))
            for plain, turned in orders(other, ADD):
                if wanted[0] in orders(plain, MULTIPLY) and wanted[1] in orders(turned, MULTIPLY):
                    return cos, sin
    return None


# ---- What is turned -------------------------------------------------------------------------------------------------


def _turned(node: Any, x: Any) -> bool | None:
    """Whether `node` is x turned in pairs of neighbours (True) or by halves (False); None: neither."""
    node, source = without_casts(node), without_casts(x)
    if is_call(node, torch.cat) and argument(node, 1, "dim", 0) == -1 and is_pair(node):
        second, first = node.args[0]
        half = shape_of(x)[-1] // 2
        halves = slice(None, half), slice(half, None)
        return False if _are_parts(first, second, source, *halves) else None
    pairs = len(shape_of(source)) - 1  # the dimension where they are, and whole columns
    flat = is_call(node, torch.flatten, "flatten") and argument(node, 1, "start_dim", 0) in (-2, pairs)
    if flat or (is_call(node, torch.reshape, "reshape", "view") and _is_shape_of(node, source)):
        stacked = node.args[0]
        if is_call(stacked, torch.stack) and argument(stacked, 1, "dim", 0) == -1 and is_pair(stacked):
            second, first = stacked.args[0]
            return True if _are_parts(first, second, source, _FIRST_OF_PAIRS, _SECOND_OF_PAIRS) else None
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


def is_pair(node: Node) -> bool:
    return isinstance(node.args[0], (tuple, list)) and len(node.args[0]) == 2


def _are_parts(first: Any, negated: Any, source: Node, of_first: slice, of_second: slice) -> bool:
    if not is_call(negated, operator.neg, torch.neg, "neg"):
        return False
    return _is_columns(first, source, of_first) and _is_columns(negated.args[0], source, of_second)


def columns_of(node: Any) -> slice | None:
    """The columns that a step takes of all rows, with plain numbers."""
    return _columns_in(node.args[1], node) if is_call(node, operator.getitem) else None


def _columns_in(key: Any, like: Any) -> slice | None:
    """The same of a key, and of a tensor with as many dimensions as it is for."""
    if not isinstance(key, tuple):
        return None
    *rows, columns = key
    if rows != [Ellipsis] and rows != [slice(None)] * (len(shape_of(like)) - 1):
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
    return columns_of(node) == columns and without_casts(node.args[0]) is source


def _unbound(node: Any, source: Node) -> slice | None:
    """The columns that a part of a view by pairs or by halves has, whose parts are taken along one dimension."""
    unbound: Any = node.args[0] if is_call(node, operator.getitem) and type(node.args[1]) is int else None
    if not is_call(unbound, torch.unbind, "unbind"):
        return None
    view, part = unbound.args[0], node.args[1]
    if not isinstance(view, Node) or not view.args or without_casts(view.args[0]) is not source or part not in (0, 1):
        return None
    dims, half, dim = len(shape_of(view)), shape_of(source)[-1] // 2, argument(unbound, 1, "dim", 0)
    if dim in (-1, dims - 1) and _splits_columns(view, source, (-1, 2)):
        return slice(part or None, None, 2)
    by_halves = dim in (-2, dims - 2) and _splits_columns(view, source, (2, -1))
    return (slice(None, half), slice(half, None))[part] if by_halves else None


def _splits_columns(view: Node, source: Node, sizes: tuple[int, int]) -> bool:
    if is_call(view, "unflatten"):
        return argument(view, 1, "dim") in (-1, len(shape_of(source)) - 1) and argument(view, 2, "sizes") == sizes
    return is_call(view, torch.reshape, "reshape", "view") and _is_shape_of(view, source, sizes)


def _value(number: Any) -> Any:
    """A head's depth, which follows from the weights, is the same in all calls."""
    return number.meta.get(EXAMPLE) if isinstance(number, Node) else number


# ---- Angles ---------------------------------------------------------------------------------------------------------


def _heads_dim(angles: Any, x: Any) -> int | None:
    """The dimension of heads, over which angles are the same, or 0 for those of rows without heads."""
    if len(shape_of(x)) == 3:
        return 0 if len(shape_of(angles)) == 3 and shape_of(angles)[1:] == shape_of(x)[1:] else None
    if len(shape_of(x)) != 4:
        return None
    if len(shape_of(angles)) == 2:
        return 1 if shape_of(angles) == shape_of(x)[2:] and dtype_of(angles) in FLOATING else None
    return _broadcast_dim(angles)


def _broadcast_dim(node: Any) -> int | None:
    """The dimension of angles that a model has added for heads, behind whatever it does to columns."""
    if len(shape_of(node)) != 4:
        return None
    while True:
        if is_cast(node) or is_call(node, torch.repeat_interleave, "repeat_interleave") or columns_of(node) is not None:
            node = node.args[0]
        else:
            break
    if is_call(node, torch.unsqueeze, "unsqueeze") and len(shape_of(node)) == 4:
        dim = argument(node, 1, "dim")
        return dim % 4 if dim in (1, 2, -2, -3) else None
    if is_call(node, torch.reshape, "reshape", "view") and len(shape_of(node)) == 4:
        sizes: Any = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return next((dim for dim in (1, 2) if type(sizes[dim]) is int and sizes[dim] == 1), None)
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
