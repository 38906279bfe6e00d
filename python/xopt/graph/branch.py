"""Branches on what a tensor says: whether all tokens of a mask are there, or positions follow each other.

A recording goes one way, and a step of it sees that other calls go the same. It has to be told before much has been
computed: a call that turns out to go another way is begun anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Node

from xopt.graph.parts import EXAMPLE

_SIZES = ("size", "numel")  # methods, which say nothing of values
_MOST_STEPS = 256  # from the arguments to what is asked


def truth(tensor: torch.Tensor, _: None) -> bool:
    return bool(tensor)


def has_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype


def is_told_by_arguments(node: Node) -> bool:
    """Whether nothing but the arguments, sizes and tables of integers say what it is: no layer has computed it."""
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if len(seen) > _MOST_STEPS or (each.op == "get_attr" and not _is_table(each.meta[EXAMPLE])):
            return False
        if each.target not in _SIZES:
            waiting += each.all_input_nodes
    return True


def _is_table(example: Any) -> bool:
    return not isinstance(example, nn.Module) and not example.dtype.is_floating_point
