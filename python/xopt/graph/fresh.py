"""Which steps give a tensor that nothing else refers to: what is done to it in place can as well make a new one."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from xopt.graph.parts import name_of

_FRESH = frozenset(
    {
        *("linear", "matmul", "add", "mul", "sub", "layer_norm", "bmm", "cat", "zeros_like"),
        *("truediv", "div", "pow", "exp", "softmax", "gelu", "masked_fill", "where", "zeros", "ones", "full", "arange"),
        *("conv", "conv1d", "conv2d", "conv3d", "batch_norm", "group_norm", "relu", "silu", "hardswish", "max_pool2d"),
        *("conv_transpose", "interpolate", "gather", "scatter", "sum", "mean", "sigmoid", "abs", "rms_norm"),
        *("rotary", "scaled_dot_product_attention", "attention_in_parts", "attention_step"),
        *("gated_linear_attention", "selective_scan", "causal_conv", "merged_linear", "linear_norm", "cos", "sin"),
        *("copied_with_part", "stack", "repeat", "clone", "roll", "flip", "sqrt", "rsqrt", "neg", "tanh", "embedding"),
    }
)
# And these, whose parts may be written to: no pattern takes them for another.
_BLANK = frozenset(
    {
        *("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "with_part"),
    }
)


_VIEWS = frozenset(
    {
        *("getitem", "__getitem__", "narrow", "select", "view", "reshape", "flatten", "unflatten", "squeeze"),
        *("unsqueeze", "transpose", "permute", "contiguous", "chunk", "split", "unbind"),
        *("to", "type_as", "float"),  # which may give the tensor itself
    }
)


def is_fresh(target: Any) -> bool:
    """Whether a step of this function or method gives a tensor that nothing else refers to."""
    name = name_of(target)
    return name in _FRESH or name in _BLANK


def is_blank(target: Any) -> bool:
    """And one whose parts may be written to."""
    return name_of(target) in _BLANK


def memory_of(node: Node) -> Node | None:
    """The step that has made the memory which a step's result lies in, if nothing else refers to that but views."""
    while not is_fresh(node.target):
        source = node.args[0] if node.args and name_of(node.target) in _VIEWS else None
        if node.op == "placeholder" or not isinstance(source, Node):
            return None
        node = source
    return node


def is_read_after(memory: Node, change: Node, places: dict[Node, int]) -> bool:
    """Whether what a step made, or a view of it, is read after a change of it in place, but by the change itself."""
    changed = _view_of(memory, change)
    for user in memory.users:
        if user is change or name_of(user.target) in ("size", "expect") or _are_apart(user, changed):
            continue
        if places[user] > places[change] or (not is_fresh(user.target) and is_read_after(user, change, places)):
            return True
    return False


def _view_of(memory: Node, change: Node) -> Node:
    """The step on the way from a step's result to a change of it that sees that result."""
    while change.args and isinstance(change.args[0], Node) and change.args[0] is not memory:
        change = change.args[0]
    return change


def _are_apart(one: Node, other: Node) -> bool:
    """Whether both are parts of one tensor at different places of its first dimension."""
    places = []
    for node in (one, other):
        key = node.args[1] if name_of(node.target) in ("getitem", "__getitem__") else None
        first = key[0] if isinstance(key, tuple) and key else key
        if type(first) is not int:
            return False
        places.append(first)
    return one.args[0] is other.args[0] and places[0] != places[1] and min(places) >= 0


def is_written_to(node: Node) -> bool:
    """Whether a part of a step's result is written to where it lies: it, or what it is a view of, is a blank tensor."""
    memory = memory_of(node)
    while memory is not None and name_of(memory.target) == "with_part":
        memory = memory_of(memory.args[0]) if isinstance(memory.args[0], Node) else None
    return memory is not None and _has_parts_written(memory)


def _has_parts_written(node: Node) -> bool:
    for user in node.users:
        if name_of(user.target) == "with_part" and user.args[0] is node:
            return True
        if name_of(user.target) in _VIEWS and user.args[0] is node and _has_parts_written(user):
            return True
    return False
