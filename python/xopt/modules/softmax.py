"""Softmax over one dimension, as a link of chains. By itself it stays torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional

from xopt.modules.chain import Call, Seen, Shape, Value, chainable
from xopt.modules.pattern import argument, dtype_of, shape_of
from xopt.modules.views import transposed
from xopt.ops.fakes import FLOATING

SOFTMAX = (torch.softmax, functional.softmax, "softmax")


def is_along_last(softmax: Node) -> bool:
    return argument(softmax, 1, "dim") in (-1, len(shape_of(softmax)) - 1)


def _is_plain(node: Node) -> bool:
    """Whether it is torch's along a dimension that is told, in the dtype of its input."""
    dim, dims = argument(node, 1, "dim"), len(shape_of(node))
    named = {name for name, value in node.kwargs.items() if value is not None}
    alone = len(node.args) <= 2 and named <= {"dim", "_stacklevel"}
    known = type(dim) is int and -dims <= dim < dims
    return known and alone and dtype_of(node) == dtype_of(node.args[0]) and dtype_of(node) in FLOATING


@chainable(*SOFTMAX, where=_is_plain, is_torchs=True, is_row_major=is_along_last)
def _softmax_call(seen: Seen, input: Value, dim: int, **others: Any) -> Call:
    """Along another dimension than the last one, on what has that for its last."""

    def fits(shape: Shape) -> bool:
        return -len(shape) <= dim < len(shape)

    if dim == -1:
        return _along_last(input)
    return transposed(seen.call(_along_last(seen.call(transposed(input, dim, -1)._replace(fits=fits)))), dim, -1)


def _along_last(input: Value) -> Call:
    return Call("softmax", (input, None), input, lambda shape: shape)
