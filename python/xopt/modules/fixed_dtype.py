"""Whose dtype is the same in all calls, and casts to it, which do nothing."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.branch import has_dtype
from xopt.graph.steps import expect
from xopt.modules.chain import linkables
from xopt.modules.computed_once import ComputedOnce
from xopt.modules.pattern import Pattern, dtype_of, is_call, is_cast, is_on_cpu
from xopt.modules.told_sizes import is_told_size
from xopt.ops.fakes import FLOATING

_TO_ONE_DTYPE = ("float", "half", "bfloat16")  # methods, whose names say which


def has_fixed_dtype(node: Node) -> bool:
    """Whether a call's kind or the graph itself tells its dtype: nobody knows that of what an object holds."""
    if any(is_call(user, expect) and user.args[0] is has_dtype for user in node.users):
        return True
    if node.op in ("placeholder", "get_attr") or isinstance(node.target, ComputedOnce) or is_told_size(node):
        return True
    if is_cast(node) and (node.target in _TO_ONE_DTYPE or any(_names_a_dtype(each, node) for each in _told(node))):
        return True
    if not is_call(node, operator.getitem, *linkables):
        return False
    return "out_dtype" in node.kwargs or all(map(has_fixed_dtype, node.all_input_nodes))


def takes_fixed_floats(node: Node) -> bool:
    """Whether all that a step takes by its place are tensors on the CPU, of dtypes that kernels know in all calls."""
    tensors: list[Any] = [each for each in node.args if each is not None]
    return all(is_on_cpu(each) and has_fixed_dtype(each) and dtype_of(each) in FLOATING for each in tensors)


def names_a_dtype(cast: Node) -> bool:
    """And nothing else: no device, no layout, no wish for a copy."""
    return all(_names_a_dtype(each, cast) for each in _told(cast))


def _names_a_dtype(argument: Any, cast: Node) -> bool:
    if cast.target == "type_as":
        return isinstance(argument, Node) and has_fixed_dtype(argument)
    return isinstance(argument, torch.dtype)


def _told(cast: Node) -> tuple[Any, ...]:
    return (*cast.args[1:], *cast.kwargs.values())


class DropCast(Pattern):
    stage: ClassVar[int] = 5
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in list(graph.nodes):
            source: Any = node.args[0] if is_cast(node) and names_a_dtype(node) else None
            if source is not None and dtype_of(node) == dtype_of(source) and has_fixed_dtype(source):
                node.replace_all_uses_with(source)
                graph.erase_node(node)
