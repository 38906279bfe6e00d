"""Heads of keys and values that a forward repeats, each for a group of the query's: attention reads them once."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from xopt.modules.pattern import argument, is_call, shape_of

_WITH_ONE_MORE = (slice(None), slice(None), None, slice(None), slice(None))


def before_repeats(key: Any, value: Any) -> tuple[Node, Node] | None:
    """Both as they were before, if they were repeated as often."""
    sources = [_before_repeat(each) for each in (key, value)]
    same = len({shape_of(source)[1:2] for source in sources}) == 1
    return (sources[0], sources[1]) if same and None not in sources else None


def _before_repeat(node: Any) -> Any:
    if is_call(node, torch.repeat_interleave, "repeat_interleave"):
        source, times, dim = (argument(node, place, name) for place, name in enumerate(("input", "repeats", "dim")))
        fits = type(times) is int and dim == 1 and len(shape_of(node)) == 4
        return source if fits and not node.kwargs.keys() - {"repeats", "dim"} else None
    enlarged: Any = node.args[0] if is_call(node, "reshape", torch.reshape) else None
    one: Any = enlarged.args[0] if is_call(enlarged, "expand") else None
    adds_one = is_call(one, "unsqueeze", torch.unsqueeze) and argument(one, 1, "dim") in (2, -3)
    if not adds_one and not (is_call(one, operator.getitem) and one.args[1] == _WITH_ONE_MORE):
        return None
    source = one.args[0]
    if len(shape_of(source)) != 4 or len(shape_of(enlarged)) != 5:
        return None
    batch, heads, rows, depth = shape_of(source)
    times = shape_of(enlarged)[2]
    fits = shape_of(enlarged) == (batch, heads, times, rows, depth)
    return source if fits and shape_of(node) == (batch, heads * times, rows, depth) else None
