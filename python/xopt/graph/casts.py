"""What a recorded forward's own casts tell of the dtype that it wants of what comes next, under xopt's autocast."""

from __future__ import annotations

import operator
from typing import Any

import torch

from xopt.graph.autocast import CASTS, widens
from xopt.graph.parts import EXAMPLE
from xopt.graph.steps import Described
from xopt.graph.symbol import Symbol

_PRODUCTS = (operator.mul, torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)


def was_widened(value: Any) -> bool:
    """Whether the forward itself asked for this in fp32."""
    dtypes = _cast(value)
    return dtypes is not None and widens(*dtypes)


def dtype_asked_for(function: Any, args: Any) -> torch.dtype | None:
    """Of a product of a parameter and a value that the forward has narrowed for it, as norms do before they multiply by
    their weights: the dtype that it has where the parameter is as narrow. None: there is nothing to ask for.

    The weights of norms stay fp32, and would make fp32 of queries and keys, which attention then computes with and
    caches hold."""
    if function not in _PRODUCTS or len(args) != 2:
        return None
    for value, parameter in (args, args[::-1]):
        dtypes = _cast(value)
        if dtypes is not None and type(parameter) is Symbol and parameter._node.op == "get_attr":
            source, result = dtypes
            return result if widens(result, source) and widens(result, parameter._example.dtype) else None
    return None


def _cast(value: Any) -> tuple[torch.dtype, torch.dtype] | None:
    """From which dtype to which; None: it is no cast."""
    if type(value) is not Symbol or value._node.target not in CASTS:
        return None
    cast: Any = value._node
    source, result = (node.meta.get(EXAMPLE) for node in (cast.args[0], cast))
    known = isinstance(source, Described) and isinstance(result, Described)
    return (source.dtype, result.dtype) if known else None
