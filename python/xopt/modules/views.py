"""Views between the steps of a program, as links of chains: torch's methods that compute nothing.

Each is a call of the method's own name (csrc/ops/views.cpp). Their numbers are constants or sizes, which a chain looks
up in each call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE
from xopt.modules.chain import Call, Seen, Shape, Value, chainable
from xopt.modules.pattern import Pattern, argument, calls, is_told_size, put_in_place, shape_of
from xopt.ops.chain import SizeOf
from xopt.ops.views import contiguous_unless_channels_last

_ALL = slice(None)
_MOST_DIMS = 8  # that a call of a chain knows


def _view(
    *steps: Any, where: Callable[[Node], bool], has_parts: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def is_told(node: Node) -> bool:
        return max(len(shape_of(node)), len(shape_of(node.args[0]))) <= _MOST_DIMS and where(node)

    return chainable(*steps, where=is_told, is_view=True, has_parts=has_parts)


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


@_view("reshape", "view", torch.reshape, where=_has_sizes)
def _reshape(seen: Seen, input: Value, *given: Any) -> Call:
    sizes = _listed(given)
    others = tuple(dict.fromkeys(value for each in sizes if isinstance(each, SizeOf) for value in each.values()))

    def shape(shape: Shape, *shapes: Shape) -> Shape:
        shape_of = dict(zip(others, shapes, strict=True))
        known = [
            each.number(lambda value, dim: shape_of[value][dim]) if isinstance(each, SizeOf) else each for each in sizes
        ]
        rest = math.prod(size for size in known if size != -1)
        return tuple(math.prod(shape) // max(rest, 1) if size == -1 else size for size in known)

    return Call("reshape", (input, sizes), input, shape, others=others)


@_view("flatten", torch.flatten, where=_has_numbers)
def _flatten(seen: Seen, input: Value, start_dim: int = 0, end_dim: int = -1) -> Call:
    def shape(shape: Shape) -> Shape:
        first, last = start_dim % len(shape), end_dim % len(shape)
        return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])

    return Call("flatten", (input, start_dim, end_dim), input, shape)


@_view("contiguous", where=_has_numbers)
def _contiguous(seen: Seen, input: Value) -> Call:
    return Call("contiguous", (input,), input, lambda shape: shape)


@_view(contiguous_unless_channels_last, where=_has_numbers)
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


@_view("permute", torch.permute, where=_has_sizes)
def _permute(seen: Seen, input: Value, *given: Any) -> Call:
    dims = _listed(given)
    return Call("permute", (input, dims), input, lambda shape: tuple(shape[dim] for dim in dims))


@_view("unsqueeze", torch.unsqueeze, where=_has_numbers)
def _unsqueeze(seen: Seen, input: Value, dim: int) -> Call:
    def shape(shape: Shape) -> Shape:
        place = dim % (len(shape) + 1)
        return (*shape[:place], 1, *shape[place:])

    return Call("unsqueeze", (input, dim), input, shape)


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


def narrowed(input: Value, start: int, length: int) -> Call:
    """Columns of the last dimension."""
    return Call("narrow", (input, -1, start, length), input, lambda shape: (*shape[:-1], length))


def _takes_one(node: Node) -> bool:
    """Whether it takes one element of one dimension, and all of the others (`x[:, 0]`)."""
    key = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(each == _ALL or type(each) is int for each in key) and sum(type(each) is int for each in key) == 1


@_view(operator.getitem, where=_takes_one)
def _select(seen: Seen, input: Value, key: Any) -> Call:
    listed = key if type(key) is tuple else (key,)
    dim = next(place for place, each in enumerate(listed) if type(each) is int)

    def shape(shape: Shape) -> Shape:
        return (*shape[:dim], *shape[dim + 1 :])

    return Call("select", (input, dim, listed[dim]), input, shape)


def _splits(node: Node) -> bool:
    size, dim = argument(node, 1, "split_size"), argument(node, 2, "dim", 0)
    return type(size) is int and type(dim) is int and node.kwargs.keys() <= {"dim"}


@_view("split", torch.split, where=_splits, has_parts=True)
def _split(seen: Seen, input: Value, size: int, dim: int = 0) -> list[Call]:
    """As many parts as are wanted, none of them shorter than the others."""

    def part(place: int) -> Call:
        def shape(shape: Shape) -> Shape:
            sizes = list(shape)
            sizes[dim] = size
            return tuple(sizes)

        def fits(shape: Shape) -> bool:
            return shape[dim] >= (place + 1) * size

        return Call("narrow", (input, dim, place * size, size), input, shape, fits=fits)

    return [part(place) for place in range(seen.parts)]
