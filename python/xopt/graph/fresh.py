"""Which steps give a tensor that nothing else refers to: what is done to it in place can as well make a new one."""

from __future__ import annotations

from typing import Any

from xopt.graph.parts import name_of

_FRESH = frozenset(
    {
        *("linear", "matmul", "add", "mul", "sub", "layer_norm", "bmm", "cat", "zeros_like"),
        *("truediv", "div", "pow", "exp", "softmax", "gelu", "masked_fill", "where", "zeros", "ones", "full", "arange"),
        *("conv", "conv1d", "conv2d", "conv3d", "batch_norm", "group_norm", "relu", "silu", "hardswish", "max_pool2d"),
        *("conv_transpose", "interpolate", "gather", "scatter", "sum", "mean", "sigmoid", "abs"),
    }
)
# And these, whose parts may be written to: no pattern takes them for another.
_BLANK = frozenset(
    {
        *("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "with_part"),
    }
)


def is_fresh(target: Any) -> bool:
    """Whether a step of this function or method gives a tensor that nothing else refers to."""
    name = name_of(target)
    return name in _FRESH or name in _BLANK


def is_blank(target: Any) -> bool:
    """And one whose parts may be written to."""
    return name_of(target) in _BLANK
