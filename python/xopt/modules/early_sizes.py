"""Sizes of a program's results that are sizes of what it is given, as far as a few steps tell: with those, what depends
on sizes alone can be computed before anything else."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from xopt.graph.parts import EXAMPLE, name_of
from xopt.modules.pattern import argument, is_call, is_cast, permutation, shape_of
from xopt.modules.told_sizes import is_negative, is_size, sign_of

_ROWS_OF = {"embedding": 0, "linear": 1, "merged_linear": 1, "layer_norm": 0, "rms_norm": 0}
"""Steps whose results have an argument's sizes, but for the last: that argument's place."""


def early_number(number: Any, first: Node) -> Any | None:
    """The same number, made of what a program is given, before its first step; None: nothing tells it there."""
    if type(number) is int:
        return number
    if is_size(number):
        return _early_size(number.args[0], argument(number, 1, "dim"), first)
    if not is_negative(number) and sign_of(number) is None:
        return None
    numbers = tuple(early_number(each, first) for each in number.args)
    if None in numbers:
        return None
    with first.graph.inserting_before(first):
        node = first.graph.call_function(number.target, numbers)
    node.meta.update(number.meta)
    return node


def _early_size(tensor: Node, dim: int, first: Node) -> Any | None:
    dims = len(shape_of(tensor))
    dim %= max(1, dims)
    if tensor.op == "placeholder":
        with first.graph.inserting_before(first):
            node = first.graph.call_method("size", (tensor, dim))
        node.meta[EXAMPLE] = shape_of(tensor)[dim]
        return node
    if is_cast(tensor):
        return _early_size(tensor.args[0], dim, first)  # type: ignore[arg-type]
    order = permutation(tensor)
    if order is not None:
        return _early_size(tensor.args[0], order[dim], first)  # type: ignore[arg-type]
    if is_call(tensor, "view", "reshape", torch.reshape):
        asked: Any = tensor.args[1] if isinstance(tensor.args[1], (tuple, list)) else tensor.args[1:]
        is_told = len(asked) == dims and asked[dim] != -1
        return early_number(asked[dim], first) if is_told else None
    step: Any = tensor.args[0] if is_call(tensor, operator.getitem) else tensor
    place = _ROWS_OF.get(name_of(step.target)) if is_call(step, step.target) else None
    if place is None or len(step.args) <= place or dim == dims - 1:
        return None
    return _early_size(step.args[place], dim, first) if isinstance(step.args[place], Node) else None
