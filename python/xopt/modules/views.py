"""Views between the steps of a program, as links of chains: torch's methods that compute nothing.

Each is a call of the method's own name (csrc/ops/views.cpp). Their numbers are constants or sizes, which a chain looks
up in each call.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from xopt.graph.record import EXAMPLE
from xopt.modules.chain import Call, Seen, Shape, Value, chainable, linkables
from xopt.modules.pattern import (
    Pattern,
    argument,
    calls,
    dtype_of,
    is_call,
    is_on_cpu,
    leaves,
    permutation,
    put_in_place,
    shape_of,
)
from xopt.modules.told_sizes import is_told_size, numbers_of
from xopt.ops.chain import Number
from xopt.ops.fakes import FLOATING
from xopt.ops.views import FORMATS, channels_last, chunked, contiguous_unless_channels_last, padded, sliced

_ALL = slice(None)
_MOST_DIMS = 8  # that a call of a chain knows
_MOST = 2**63 - 1  # elements
_PARTED = ("split", torch.split, "split_with_sizes", "chunk", torch.chunk)


def _view(
    *steps: Any,
    where: Callable[[Node], bool],
    has_parts: bool = False,
    channels_last: Callable[[Node], bool | None] = lambda node: False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def is_told(node: Node) -> bool:
        return max(len(shape_of(node)), len(shape_of(node.args[0]))) <= _MOST_DIMS and where(node)

    return chainable(*steps, where=is_told, is_view=True, has_parts=has_parts, channels_last=channels_last)


def _has_sizes(node: Node) -> bool:
    """Whether it takes numbers and sizes alone, be it one by one or as one tuple."""
    given = node.args[1:]
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    return not node.kwargs and bool(given) and all(type(each) is int or is_told_size(each) for each in given)


def _has_numbers(node: Node) -> bool:
    return all(type(each) is int for each in (*node.args[1:], *node.kwargs.values()))


def _unflattens_last(node: Node) -> bool:
    sizes = argument(node, 2, "sizes")
    numbers = isinstance(sizes, (tuple, list)) and all(type(size) is int for size in sizes)
    return numbers and argument(node, 1, "dim") == -1 and len(node.args) == 3


def _listed(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return given[0] if len(given) == 1 and type(given[0]) is tuple else given


class ViewAsAnother(Pattern):
    """`x.reshape_as(other)` as a view of sizes, which a chain knows; `other` then has a reader less."""

    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, "reshape_as", "view_as"):
            if len(node.args) != 2 or node.kwargs:
                continue
            image, other = node.args
            with graph.inserting_before(node):
                sizes = []
                for dim, size in enumerate(shape_of(other)):
                    sizes.append(graph.call_method("size", (other, dim)))
                    sizes[-1].meta[EXAMPLE] = size
                put_in_place(graph, node, graph.call_method("reshape", (image, tuple(sizes))))


def _puts_channels_last(node: Node) -> bool:
    """Whether the last dimension of rows becomes an image's channels."""
    dims, source = len(shape_of(node)), node.args[0]
    if permutation(node) is not None:
        return dims > 2 and permutation(node) == (0, dims - 1, *range(1, dims - 1)) and are_rows(source)
    is_image = dims > 3 and len(shape_of(source)) == 3 and shape_of(node)[:2] == shape_of(source)[:2]
    return is_image and permutation(source) == (0, 2, 1) and are_rows(source.args[0])  # type: ignore[union-attr]


def are_rows(node: Any) -> bool:
    """Whether a tensor's dimensions lie in memory in their order, be it with gaps between: a layer's result, or parts
    of its rows."""
    if is_call(node, operator.getitem):
        source: Any = node.args[0]
        if type(node.args[1]) is int:
            return are_rows(source.args[0] if is_call(source, *_PARTED) else source)
        whole = all(isinstance(each, slice) and each.step in (None, 1) for each in _listed_key(node.args[1]))
        return whole and are_rows(source)
    if is_call(node, "reshape", "view", torch.reshape, "unflatten"):
        return are_rows(node.args[0])
    return is_call(node, *linkables) and linkables[node.target].is_row_major(node)


def reshaped(input: Value, sizes: Sequence[Number]) -> Call:
    others, numbers = numbers_of(tuple(sizes))

    def shape(shape: Shape, *shapes: Shape) -> Shape:
        known = numbers(*shapes)
        rest = math.prod(size for size in known if size != -1)
        return tuple(math.prod(shape) // max(rest, 1) if size == -1 else size for size in known)

    return Call("reshape", (input, tuple(sizes)), input, shape, others=others)


@_view("reshape", "view", torch.reshape, where=_has_sizes, channels_last=_puts_channels_last)
def _reshape(seen: Seen, input: Value, *given: Any) -> Call:
    return reshaped(input, _listed(given))


def flattened(input: Value, start_dim: int = 0, end_dim: int = -1) -> Call:
    def shape(shape: Shape) -> Shape:
        first, last = start_dim % len(shape), end_dim % len(shape)
        return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])

    return Call("flatten", (input, start_dim, end_dim), input, shape)


@_view("flatten", torch.flatten, where=_has_numbers)
def _flatten(seen: Seen, input: Value, start_dim: int = 0, end_dim: int = -1) -> Call:
    return flattened(input, start_dim, end_dim)


@_view("contiguous", where=_has_numbers)
def _contiguous(seen: Seen, input: Value) -> Call:
    return Call("contiguous", (input,), input, lambda shape: shape)


@_view(contiguous_unless_channels_last, where=_has_numbers, channels_last=lambda node: None)
def _contiguous_unless_channels_last(seen: Seen, input: Value) -> Call:
    return Call(contiguous_unless_channels_last.__name__, (input,), input, lambda shape: shape)


@_view("unflatten", where=_unflattens_last)
def _unflatten(seen: Seen, input: Value, dim: int, sizes: tuple[int, ...]) -> Call:
    def shape(shape: Shape) -> Shape:
        rest = math.prod(size for size in sizes if size != -1)
        return (*shape[:-1], *(shape[-1] // rest if size == -1 else size for size in sizes))

    return Call("unflatten", (input, dim, sizes), input, shape)


def transposed(input: Value, dim0: int, dim1: int) -> Call:
    def shape(shape: Shape) -> Shape:
        sizes = list(shape)
        sizes[dim0], sizes[dim1] = sizes[dim1], sizes[dim0]
        return tuple(sizes)

    return Call("transpose", (input, dim0, dim1), input, shape)


@_view("transpose", torch.transpose, where=_has_numbers)
def _transpose(seen: Seen, input: Value, dim0: int, dim1: int) -> Call:
    return transposed(input, dim0, dim1)


def permuted(input: Value, dims: Sequence[int]) -> Call:
    return Call("permute", (input, tuple(dims)), input, lambda shape: tuple(shape[dim] for dim in dims))


@_view("permute", torch.permute, where=_has_sizes, channels_last=_puts_channels_last)
def _permute(seen: Seen, input: Value, *given: Any) -> Call:
    return permuted(input, _listed(given))


def unsqueezed(input: Value, dim: int) -> Call:
    def shape(shape: Shape) -> Shape:
        place = dim % (len(shape) + 1)
        return (*shape[:place], 1, *shape[place:])

    return Call("unsqueeze", (input, dim), input, shape)


@_view("unsqueeze", torch.unsqueeze, where=_has_numbers)
def _unsqueeze(seen: Seen, input: Value, dim: int) -> Call:
    return unsqueezed(input, dim)


def squeezed(input: Value, dim: int) -> Call:
    def shape(shape: Shape) -> Shape:
        place = dim % len(shape)
        return (*shape[:place], *shape[place + 1 :]) if shape[place] == 1 else shape

    return Call("squeeze", (input, dim), input, shape)


def _loses_one(node: Node) -> bool:
    return _has_numbers(node) and len(node.args) == 2 and len(shape_of(node)) + 1 == len(shape_of(node.args[0]))


@_view("squeeze", torch.squeeze, where=_loses_one)
def _squeeze(seen: Seen, input: Value, dim: int) -> Call:
    return squeezed(input, dim)._replace(fits=lambda shape: shape[dim] == 1)


def _with_size(shape: Shape, dim: int, size: int) -> Shape:
    sizes = list(shape)
    sizes[dim] = size
    return tuple(sizes)


def narrowed(input: Value, start: int, length: int, dim: int = -1) -> Call:
    """A part of one dimension."""
    return Call("narrow", (input, dim, start, length), input, lambda shape: _with_size(shape, dim, length))


@_view("expand", where=_has_sizes)
def _expand(seen: Seen, input: Value, *given: Any) -> Call:
    sizes = _listed(given)
    others, numbers = numbers_of(sizes)

    def shape(shape: Shape, *shapes: Shape) -> Shape:
        known = numbers(*shapes)
        own = (1,) * (len(known) - len(shape)) + shape
        return tuple(of if size == -1 else size for size, of in zip(known, own, strict=True))

    return Call("expand", (input, sizes), input, shape, others=others)


def _pads_with_a_constant(node: Node) -> bool:
    """Whether it is neither copied for somebody nor for a dtype that kernels do not know."""
    amounts, value = argument(node, 1, "pad"), argument(node, 3, "value")
    known = isinstance(amounts, (tuple, list)) and 0 < len(amounts) <= _MOST_DIMS and len(amounts) % 2 == 0
    numbers = known and all(type(each) is int or is_told_size(each) for each in amounts)
    constant = argument(node, 2, "mode", "constant") == "constant" and type(value) in (int, float, type(None))
    return numbers and constant and dtype_of(node) in FLOATING and is_on_cpu(node) and not leaves(node)


@_view(functional.pad, where=_pads_with_a_constant, channels_last=lambda node: None)
def _pad(seen: Seen, input: Value, pad: tuple[Any, ...], mode: str = "constant", value: float | None = None) -> Call:
    others, numbers = numbers_of(pad)

    def shape(shape: Shape, *shapes: Shape) -> Shape:
        known = numbers(*shapes)
        sizes = list(shape)
        for place, amount in enumerate(known):
            sizes[-1 - place // 2] += amount
        return tuple(sizes)

    return Call(padded.__name__, (input, pad, float(value or 0.0)), input, shape, others=others)


def _has_an_order(node: Node) -> bool:
    return len(shape_of(node)) in FORMATS


@_view(channels_last, where=_has_an_order, channels_last=lambda node: True)
def _channels_last(seen: Seen, image: Value) -> Call:
    return Call(channels_last.__name__, (image,), image, lambda shape: shape)


def _selected(input: Value, dim: int, index: int) -> Call:
    def shape(shape: Shape) -> Shape:
        place = dim % len(shape)
        return (*shape[:place], *shape[place + 1 :])

    return Call("select", (input, dim, index), input, shape)


def _sliced(input: Value, dim: int, taken: slice) -> Call:
    start = 0 if taken.start is None else taken.start
    bounds = (start, _MOST if taken.stop is None else taken.stop, taken.step or 1)
    others, numbers = numbers_of(bounds)

    def shape(shape: Shape, *shapes: Shape) -> Shape:
        return _with_size(shape, dim, len(range(shape[dim])[slice(*numbers(*shapes))]))

    return Call(sliced.__name__, (input, dim, bounds), input, shape, others=others)


def _listed_key(key: Any) -> tuple[Any, ...]:
    return key if type(key) is tuple else (key,)


def _has_only_numbers(node: Node) -> bool:
    """Whether it takes a part of a tensor by numbers and slices of numbers or sizes (`x[:, 0]`, `x[..., None, 1:]`)."""

    def is_known(each: Any) -> bool:
        if isinstance(each, slice):
            bounds = all(type(bound) in (int, type(None)) or is_told_size(bound) for bound in (each.start, each.stop))
            return bounds and (each.step is None or (type(each.step) is int and each.step > 0))
        return each is None or each is ... or type(each) is int

    key = _listed_key(node.args[1])
    return all(map(is_known, key)) and sum(each is ... for each in key) <= 1 and len(shape_of(node.args[0])) > 0


def _keeps_channels_last(node: Node) -> bool | None:
    """None: it takes some of an image's channels, lines and columns."""
    key = _listed_key(node.args[1])
    keeps = all(isinstance(each, slice) for each in key) and all(each.step in (None, 1) for each in key[1:2])
    return None if keeps else False


@_view(operator.getitem, where=_has_only_numbers, channels_last=_keeps_channels_last)
def _taken(seen: Seen, input: Value, key: Any) -> Call:
    listed = _listed_key(key)
    calls: list[Call] = []

    def take(each: Any, dim: int) -> int:
        """How many dimensions it leaves there."""
        source = seen.call(calls.pop()) if calls and each != _ALL else input
        if each is None:
            calls.append(unsqueezed(source, dim))
        elif type(each) is int:
            calls.append(_selected(source, dim, each))
            return 0
        elif each != _ALL:
            calls.append(_sliced(source, dim, each))
        return 1

    before = listed.index(...) if ... in listed else len(listed)
    dim = 0
    for each in listed[:before]:
        dim += take(each, dim)
    dim = -1
    for each in reversed(listed[before + 1 :]):
        dim -= take(each, dim)
    return calls[0] if calls else _sliced(input, 0, _ALL)


def _splits(node: Node) -> bool:
    if len(node.args) < 2 or not node.kwargs.keys() <= {"dim"}:
        return False
    size, dim = node.args[1], argument(node, 2, "dim", 0)
    return all(type(each) is int for each in (dim, *(size if isinstance(size, (tuple, list)) else (size,))))


@_view("split", torch.split, "split_with_sizes", where=_splits, has_parts=True, channels_last=lambda node: None)
def _split(seen: Seen, input: Value, size: int | tuple[int, ...], dim: int = 0) -> list[Call]:
    """As many parts as are wanted, none of them shorter than it has to be."""
    sizes = (size,) * seen.parts if isinstance(size, int) else size
    whole = None if isinstance(size, int) else sum(sizes)

    def part(start: int, length: int) -> Call:
        def fits(shape: Shape) -> bool:
            return shape[dim] >= start + length if whole is None else shape[dim] == whole

        return narrowed(input, start, length, dim)._replace(fits=fits)

    starts = itertools.accumulate(sizes, initial=0)
    return [part(start, length) for start, length in zip(starts, sizes[: seen.parts], strict=False)]


def _chunks(node: Node) -> bool:
    return node.kwargs.keys() <= {"chunks", "dim"} and _has_numbers(node)


@_view("chunk", torch.chunk, where=_chunks, has_parts=True, channels_last=lambda node: None)
def _chunk(seen: Seen, input: Value, chunks: int, dim: int = 0) -> list[Call]:
    def part(place: int) -> Call:
        def bounds(size: int) -> range:
            length = -(-size // chunks)
            return range(size)[place * length : (place + 1) * length]

        def shape(shape: Shape) -> Shape:
            return _with_size(shape, dim, len(bounds(shape[dim])))

        def fits(shape: Shape) -> bool:
            return len(bounds(shape[dim])) > 0

        return Call(chunked.__name__, (input, dim, chunks, place), input, shape, fits=fits)

    return [part(place) for place in range(seen.parts)]


@_view("unbind", torch.unbind, where=_has_numbers, has_parts=True)
def _unbind(seen: Seen, input: Value, dim: int = 0) -> list[Call]:
    def part(place: int) -> Call:
        return _selected(input, dim, place)._replace(fits=lambda shape: shape[dim] > place)

    return [part(place) for place in range(seen.parts)]
