"""How many parts a step takes a tensor into: fixed in a recorded graph, so it has to be the same in all of its calls.

Where it follows from a size (`x.unbind(1)`, `x.split(2, 1)`), the recorder expects it of each call, unless that size is
one that all calls have: that of a product by weights, or one that the forward gives as a number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

EXAMPLE = "example"  # in a node's meta: its value in the recorded call, and of a tensor only a description

_KEEP_SIZES = frozenset(
    {
        *("float", "bfloat16", "half", "double", "to", "type", "type_as", "contiguous", "clone", "detach"),
        *("gelu", "relu", "silu", "sigmoid", "tanh", "softmax", "neg", "dropout", "layer_norm", "rms_norm"),
        *(
            "batch_norm",
            "group_norm",
            "instance_norm",
            "relu6",
            "hardswish",
            "hardsigmoid",
            "leaky_relu",
            "mish",
            "elu",
        ),
    }
)
_POOLS = (_MaxPoolNd, _AvgPoolNd, _AdaptiveMaxPoolNd, _AdaptiveAvgPoolNd)
_SPREAD = frozenset({"add", "sub", "mul", "truediv", "div", "__add__", "__mul__", "__radd__", "__rmul__"})
_GIVEN_SIZES = frozenset({"reshape", "view"})


def has_length(parts: Any, length: int) -> bool:
    return len(parts) == length


def name_of(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


@functools.cache
def _makes_list(name: str) -> bool:
    """Whether torch's operator of this name makes a list of one tensor."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}") if name.isidentifier() else ()
    return any(
        [str(each.type) for each in schema.returns] == ["List[Tensor]"] and str(schema.arguments[0].type) == "Tensor"
        for schema in schemas
        if schema.arguments
    )


def length_follows_sizes(node: Node) -> bool:
    """Whether another call may have another number of parts than the recorded one."""
    name = name_of(node.target)
    if not _makes_list(name):
        return False
    source, *numbers = node.args
    if any(isinstance(each, Node) for each in _flat((numbers, node.kwargs))) or not isinstance(source, Node):
        return True
    if name == "unbind":
        given: Any = None
    else:
        given = numbers.pop(0) if numbers else next(iter(node.kwargs.values()), None)
    if isinstance(given, (tuple, list)) and name in ("split", "split_with_sizes"):
        return False
    dim = numbers[0] if numbers else node.kwargs.get("dim", 0)
    return name not in ("unbind", "split", "chunk") or type(dim) is not int or not is_same_in_all_calls(source, dim)


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def is_same_in_all_calls(node: Node, dim: int) -> bool:
    """Whether it is known that this size of a recorded tensor is so in all calls."""
    shape = _shape(node)
    if shape is None:
        return False
    dim %= len(shape)
    if node.op == "get_attr":
        return True
    name, source = name_of(node.target), node.args[0] if node.args else None
    if not isinstance(source, Node):
        return False
    module = source.meta.get(EXAMPLE)
    if isinstance(module, _POOLS):
        return dim == 1 and len(shape) >= 4 and is_same_in_all_calls(node.args[1], dim)  # type: ignore[arg-type]
    if isinstance(module, nn.Module):
        return _is_of_module(module, shape, dim)
    if name == "linear":
        return dim == len(shape) - 1 and _is_weight(node.args[1] if len(node.args) > 1 else node.kwargs.get("weight"))
    if name in _GIVEN_SIZES:
        sizes: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
        return isinstance(sizes, (tuple, list)) and dim < len(sizes) and type(sizes[dim]) is int and sizes[dim] >= 0
    if name == "unflatten" and len(node.args) == 3:
        return _is_same_unflattened(source, node.args[1], node.args[2], dim)
    if name == "transpose" and len(node.args) == 3:
        pair = [place % len(shape) for place in node.args[1:] if isinstance(place, int)]
        return is_same_in_all_calls(source, pair[1 - pair.index(dim)] if dim in pair else dim)
    if name == "permute":
        dims: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
        return isinstance(dims, (tuple, list)) and type(dims[dim]) is int and is_same_in_all_calls(source, dims[dim])
    if name in _KEEP_SIZES:
        return is_same_in_all_calls(source, dim)
    return name in _SPREAD and any(_decides(each, dim - len(shape), shape[dim]) for each in node.args)


def _is_same_unflattened(source: Node, unflattened: Any, sizes: Any, dim: int) -> bool:
    before = _shape(source)
    if before is None or type(unflattened) is not int or not isinstance(sizes, (tuple, list)):
        return False
    first = unflattened % len(before)
    if not first <= dim < first + len(sizes):
        return is_same_in_all_calls(source, dim if dim < first else dim - len(sizes) + 1)
    if type(sizes[dim - first]) is int and sizes[dim - first] >= 0:
        return True
    return all(type(size) is int for size in sizes) and is_same_in_all_calls(source, first)


def _shape(node: Node) -> tuple[int, ...] | None:
    return getattr(node.meta.get(EXAMPLE), "shape", None)


def _is_weight(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "get_attr"


def _is_of_module(module: nn.Module, shape: tuple[int, ...], dim: int) -> bool:
    """The features or channels that a module gives."""
    for name in ("out_features", "embedding_dim"):
        if dim == len(shape) - 1 and getattr(module, name, None) == shape[dim]:
            return True
    window = getattr(module, "kernel_size", None)
    return (
        isinstance(window, tuple)
        and dim == len(shape) - len(window) - 1
        and getattr(module, "out_channels", None) == shape[dim]
    )


def _decides(operand: Any, dim: int, size: int) -> bool:
    """Whether an operand's size, counted from the end, is that of the result, whatever the other one has."""
    shape = _shape(operand) if isinstance(operand, Node) else None
    known = shape is not None and len(shape) >= -dim and shape[dim] == size != 1
    return known and is_same_in_all_calls(operand, dim)
