"""The activations that xopt's products can end in: how they are called, and how models write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    argument,
    is_call,
    orders,
    shape_of,
)

# By the name that the operators know: what it is, of a value and its two parameters.
ACTIVATIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": lambda x, alpha, beta: x,
    "relu": lambda x, alpha, beta: functional.relu(x),
    "gelu_erf": lambda x, alpha, beta: functional.gelu(x),
    "gelu_tanh": lambda x, alpha, beta: functional.gelu(x, approximate="tanh"),
    "silu": lambda x, alpha, beta: functional.silu(x),
    "sigmoid": lambda x, alpha, beta: torch.sigmoid(x),
    "tanh": lambda x, alpha, beta: torch.tanh(x),
    "hardswish": lambda x, alpha, beta: functional.hardswish(x),
    "hardsigmoid": lambda x, alpha, beta: functional.hardsigmoid(x),
    "quick_gelu": lambda x, alpha, beta: x * torch.sigmoid(1.702 * x),
    "leaky_relu": lambda x, alpha, beta: functional.leaky_relu(x, alpha),
    "clamp": lambda x, alpha, beta: torch.clamp(x, alpha, beta),
}

RELU = (functional.relu, torch.relu, "relu")
_PLAIN = {
    "relu": RELU,
    "silu": (functional.silu,),
    "sigmoid": (functional.sigmoid, torch.sigmoid, "sigmoid"),
    "tanh": (functional.tanh, torch.tanh, "tanh"),
    "hardswish": (functional.hardswish,),
    "hardsigmoid": (functional.hardsigmoid,),
}


def activation_of(node: Any) -> tuple[Node, dict[str, Any]] | None:
    """What a node is the activation of, and which one, as arguments of `torch.ops.xopt.linear`."""
    if not isinstance(node, Node) or not node.args:
        return None
    source = node.args[0]
    found = plain_activation(node)
    if found is not None and isinstance(source, Node):
        return source, found
    for name, written_out in (("gelu_tanh", _gelu_written_out), *_GATED_BY_ITSELF):
        expanded = written_out(node)
        if expanded is not None:
            return expanded, {"activation": name}
    return None


def plain_activation(node: Node) -> dict[str, Any] | None:
    """Which one a single step is, of what it is given first."""
    return _named(node) or _parametrized(node)


def _named(node: Node) -> dict[str, Any] | None:
    for name, targets in _PLAIN.items():
        if is_call(node, *targets):
            return {"activation": name}
    if is_call(node, functional.gelu):
        approximate = argument(node, 1, "approximate", "none")
        return {"activation": "gelu_tanh" if approximate == "tanh" else "gelu_erf"}
    return None


def _parametrized(node: Node) -> dict[str, Any] | None:
    if is_call(node, functional.leaky_relu):
        return {"activation": "leaky_relu", "alpha": float(argument(node, 1, "negative_slope", 0.01))}
    bounds: tuple[Any, Any] | None = None
    if is_call(node, functional.relu6):
        bounds = 0.0, 6.0
    if is_call(node, functional.hardtanh):
        bounds = argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0)
    if is_call(node, torch.clamp, "clamp"):
        bounds = argument(node, 1, "min"), argument(node, 2, "max")
    if bounds is None or not all(isinstance(bound, (int, float)) for bound in bounds):
        return None
    return {"activation": "clamp", "alpha": float(bounds[0]), "beta": float(bounds[1])}


def _gelu_written_out(node: Node) -> Node | None:
    """0.5 x (1 + tanh(...)), of either form: the x."""
    for half, bracket in orders(node, MULTIPLY):
        x = _times(half, 0.5)
        inner: Any = _plus(bracket, 1.0)
        if x is None or not is_call(inner, torch.tanh, "tanh"):
            continue
        if _is_cubic(inner.args[0], x) or _is_factored_cubic(inner.args[0], x):
            return x  # type: ignore[no-any-return]
    return None


_ROOT = math.sqrt(2 / math.pi)


def _is_cubic(node: Any, x: Node) -> bool:
    """sqrt(2 / pi) (x + 0.044715 x^3), as GPT-2 has it"""
    for left, cubic in orders(_times(node, _ROOT), ADD):
        cube = _times(cubic, 0.044715)
        if left is x and is_call(cube, torch.pow, "pow") and cube.args[0] is x and float(cube.args[1]) == 3.0:
            return True
    return False


def _is_factored_cubic(node: Any, x: Node) -> bool:
    """sqrt(2 / pi) x (1 + 0.044715 x x), as BLOOM has it"""
    for scaled, bracket in orders(node, MULTIPLY):
        squares = orders(_plus(bracket, 1.0), MULTIPLY) if _times(scaled, _ROOT) is x else []
        if any(left is x and _times(right, 0.044715) is x for left, right in squares):
            return True
    return False


def _times_its_sigmoid(node: Node, slope: float) -> Node | None:
    """x * sigmoid(slope x): the x."""
    for x, gate in orders(node, MULTIPLY):
        inner = gate.args[0] if is_call(gate, *_PLAIN["sigmoid"]) else None
        if isinstance(x, Node) and (inner if slope == 1.0 else _times(inner, slope)) is x:
            return x
    return None


_GATED_BY_ITSELF: tuple[tuple[str, Callable[[Node], Node | None]], ...] = (
    ("silu", lambda node: _times_its_sigmoid(node, 1.0)),
    ("quick_gelu", lambda node: _times_its_sigmoid(node, 1.702)),
)


def _with_number(node: Any, targets: tuple[Any, ...], number: float) -> Any:
    for value, constant in orders(node, targets):
        if isinstance(constant, (int, float)) and math.isclose(constant, number, rel_tol=1e-6):
            return value if isinstance(value, Node) and shape_of(value) else None
    return None


def _times(node: Any, number: float) -> Any:
    return _with_number(node, MULTIPLY, number)


def _plus(node: Any, number: float) -> Any:
    return _with_number(node, ADD, number)
