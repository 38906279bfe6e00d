"""Products with one, quotients by it, sums with zero, padding with nothing, repeating once and slices of everything:
dropped. Configurations have them by default."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from xopt.graph.fresh import is_fresh
from xopt.modules.pattern import (
    ADD,
    DIVIDE,
    MULTIPLY,
    Pattern,
    allow_copies,
    argument,
    calls,
    dtype_of,
    leaves,
    operands,
    replace,
    shape_of,
    step,
)


class DropNeutralNumbers(Pattern):
    """Sums of branches begin with zero (MobileOne). That a negative zero would come out as a positive one is the only
    difference."""

    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for targets, neutral, orders in ((MULTIPLY, 1, (1, -1)), (DIVIDE, 1, (1,)), (ADD, 0, (1, -1))):
            for node in calls(graph, *targets):
                found = operands(node, targets)
                for value, number in () if found is None else (found[::order] for order in orders):
                    if type(number) in (int, float) and number == neutral and _is_same(value, node):
                        node.replace_all_uses_with(value)


class DropPaddingWithNothing(Pattern):
    """Torch copies what it pads so (Swin, wherever an image is a number of whole windows)."""

    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.pad):
            amounts, value = argument(node, 1, "pad"), node.args[0]
            if isinstance(amounts, (tuple, list)) and not any(amounts) and _is_same(value, node):
                allow_copies(node)
                node.replace_all_uses_with(value)


class RepeatOnce(Pattern):
    """Torch copies what it repeats once (DeBERTa, what it has of positions for each text of a batch)."""

    stage: ClassVar[int] = 6  # when nobody looks for it any more
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, "repeat"):
            sizes = node.args[1:]
            plain = len(sizes) == len(shape_of(node)) == len(shape_of(node.args[0])) and not node.kwargs
            if plain and not leaves(node):
                replace(graph, node, repeated, node.args, {})


@step("")
def repeated(input: Tensor, *sizes: int) -> Tensor:
    """Itself, where it is repeated once."""
    return input if all(size == 1 for size in sizes) else input.repeat(*sizes)


class DropSliceOfEverything(Pattern):
    """A language model's head takes x[:, -0:, :] of what it is given."""

    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, operator.getitem):
            value, key = node.args
            if all(map(_is_everything, key if isinstance(key, tuple) else (key,))) and _is_same(value, node):
                node.replace_all_uses_with(value)


def _is_everything(part: Any) -> bool:
    return type(part) is slice and part.start in (None, 0) and part.stop is None and part.step in (None, 1)


def _is_same(value: Any, node: Node) -> bool:
    """Not so where the block would return what it was given, or a part of it."""
    if not isinstance(value, Node) or not shape_of(value):
        return False
    if any(user.op == "output" for user in node.users) and not is_fresh(value.target):
        return False
    return dtype_of(value) == dtype_of(node) and shape_of(value) == shape_of(node)
