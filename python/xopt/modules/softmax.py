"""Softmax over the last dimension, as a link of chains. By itself it stays torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional

from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.pattern import argument, dtype_of, shape_of
from xopt.ops.fakes import FLOATING

SOFTMAX = (torch.softmax, functional.softmax, "softmax")


def is_along_last(softmax: Node) -> bool:
    return argument(softmax, 1, "dim") in (-1, len(shape_of(softmax)) - 1)


def _is_plain(node: Node) -> bool:
    """Whether it is torch's along the last dimension, in the dtype of its input."""
    last = len(shape_of(node)) > 0 and is_along_last(node)
    named = {name for name, value in node.kwargs.items() if value is not None}
    alone = len(node.args) <= 2 and named <= {"dim", "_stacklevel"}
    return last and alone and dtype_of(node) == dtype_of(node.args[0]) and dtype_of(node) in FLOATING


@chainable(*SOFTMAX, where=_is_plain, is_torchs=True, is_row_major=True)
def _softmax_call(seen: Seen, input: Value, dim: Any, **others: Any) -> Call:
    return Call("softmax", (input, None), input, lambda shape: shape, fits=lambda shape: dim in (-1, len(shape) - 1))
