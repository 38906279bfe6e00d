"""Sizes and what arithmetic makes of them, as chains know them: those of their own results before anything runs.

A forward that branches on such a number (Swin: whether there is anything to pad) expects of all calls what it was in
the recorded one. A chain asks once for all calls of the same shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from typing import Any

from torch.fx import Node

from xopt.graph.steps import expect
from xopt.modules.chain import Call, Seen, Shape, Value, chainable
from xopt.modules.pattern import argument, dtype_of, is_call, shape_of
from xopt.ops.chain import SIGNS, Number, number_of, values_in

_SIGN_OF: dict[Any, str] = {
    **{function: sign for sign, function in SIGNS.items()},
    **{operator.iadd: "+", operator.isub: "-", operator.imul: "*"},
}
_OF_INTEGERS = ("+", "-", "*", "//", "%")
_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_MOST_TERMS = 64  # csrc/ops/prepared.cpp knows twice as many: links add some


def is_size(node: Any) -> bool:
    """The size of one dimension, whatever it is of."""
    return is_call(node, "size") and type(argument(node, 1, "dim")) is int


def is_number_of_elements(node: Any) -> bool:
    return is_call(node, "numel") and dtype_of(node.args[0]) is not None


def is_negative(node: Any) -> bool:
    return is_call(node, operator.neg) and len(node.args) == 1


def is_told_size(node: Any) -> bool:
    """A size, or an integer that is made of sizes: what an operator in a chain takes."""
    return isinstance(node, Node) and _count_terms(node, _MOST_TERMS, _OF_INTEGERS, (int,)) <= _MOST_TERMS


def is_told_number(node: Any) -> bool:
    """The same of any number: what a chain can look at."""
    return isinstance(node, Node) and _count_terms(node, _MOST_TERMS, SIGNS, (int, float)) <= _MOST_TERMS


def _count_terms(node: Any, most: int, signs: Container[str], numbers: tuple[type, ...]) -> int:
    """How many numbers, sizes and signs a number is made of. More than `most`: there are too many, or something else is
    among them. What a forward computes of one size layer after layer would have twice as many with each."""
    if most < 1:
        return most + 1
    if type(node) in numbers or is_size(node):
        return 1
    if is_number_of_elements(node):
        return max(1, 2 * len(shape_of(node.args[0])) - 1)
    if is_negative(node):
        return 2 + _count_terms(node.args[0], most - 2, signs, numbers)
    if sign_of(node) not in signs:
        return most + 1
    left, right = node.args
    count = 1 + _count_terms(left, most - 1, signs, numbers)
    return count + _count_terms(right, most - count, signs, numbers)


def sign_of(node: Any) -> str | None:
    """Of a step of arithmetic."""
    return _SIGN_OF[node.target] if is_call(node, *_SIGN_OF) and len(node.args) == 2 else None


def numbers_of(sizes: tuple[Any, ...]) -> tuple[tuple[Value, ...], Callable[..., list[int]]]:
    """Of numbers and sizes: the values whose sizes they are, and what tells them all by those values' shapes."""
    values = tuple(dict.fromkeys(value for each in sizes for value in values_in(each)))

    def numbers(*shapes: Shape) -> list[int]:
        shape_of = dict(zip(values, shapes, strict=True))

        def size(value: Value, dim: int) -> int:
            found: int = shape_of[value][dim]
            return found

        return [number_of(each, size) for each in sizes]

    return values, numbers


def _compares_told(node: Node) -> bool:
    function, left, right, _ = node.args
    return function in _COMPARISONS and all(
        type(each) in (int, float) or is_told_number(each) for each in (left, right)
    )


@chainable(expect, where=_compares_told, is_view=True)
def _expect(seen: Seen, function: Any, left: Number, right: Number, outcome: Any) -> list[Call]:
    seen.expect(function, left, right, outcome)
    return []
