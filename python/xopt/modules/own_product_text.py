"""What the text of a class of modules says of its parameters: which of them its forward, and the methods that this
leads to, use as the matrix of a product and as nothing else.

A parameter that is used otherwise as well, or both ways round, is none of these. A guess that is wrong costs time, not
a result: what is packed gives its values to whoever wants them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from xopt.modules.product_by_weight import matrix_in

_DESCRIBES = frozenset({"shape", "dtype", "device", "ndim", "size", "dim", "numel", "requires_grad", "is_meta"})
_LAST_TWO = ({0, 1}, {1, 2}, {-1, -2})


class Use(NamedTuple):
    """How a parameter is a matrix."""

    turned: bool
    """Whether it is [in, out]."""
    stack: bool = False
    """Whether it is several, [matrix, ...]."""
    split: int = 0
    """Of one of three dimensions, how many are the matrix's first; 0: it has two."""
    at_once: bool = False
    """Whether all of a stack are multiplied by in one call."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == (3 if self.stack or self.split else 2)


@functools.cache
def uses_of(kind: type[nn.Module]) -> dict[str, Use]:
    """By the parameter's name."""
    found: dict[str, set[Use | None]] = {}
    for method in _methods(kind):
        for name, use in _uses_in(method):
            found.setdefault(name, set()).add(use)
    return {name: use for name, uses in found.items() if len(uses) == 1 for use in uses if use is not None}


# ---- Which methods ---------------------------------------------------------------------------------------------------


class _Method(NamedTuple):
    tree: ast.FunctionDef
    self: str
    """What it calls its module."""


def _methods(kind: type[nn.Module]) -> Iterator[_Method]:
    """The forward, and what it reads of the module that is a function or a property."""
    seen, waiting = set(), ["forward"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            method = _parsed(vars(base).get(name))
            if method is None:
                continue
            yield method
            nodes = list(ast.walk(method.tree))
            waiting += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
            if not any(isinstance(node, ast.Name) and node.id == "super" for node in nodes):
                break  # what it overrides is not called


def _parsed(value: Any) -> _Method | None:
    value = value.fget if isinstance(value, property) else getattr(value, "func", value)
    value = inspect.unwrap(value) if callable(value) else None
    if not isinstance(value, FunctionType):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # it was made in another way than by a file
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.name != value.__name__ or not tree.args.args:
        return None  # or the file has changed since
    return _Method(tree, tree.args.args[0].arg)


# ---- What is done with a parameter -----------------------------------------------------------------------------------


def _uses_in(method: _Method) -> Iterator[tuple[str, Use | None]]:
    """Each use of an attribute of the module; None: no product."""
    parents = {child: parent for parent in ast.walk(method.tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(method.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == method.self:
            parent = parents[node]
            describes = isinstance(parent, ast.Attribute) and parent.attr in _DESCRIBES
            if not describes and not _asks_whether_it_is_there(parent):
                yield node.attr, _use(node, parents)


def _asks_whether_it_is_there(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and all(isinstance(each, ast.Is | ast.IsNot) for each in node.ops)


def _use(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> Use | None:
    stack = False
    parent = parents[node]
    if isinstance(parent, ast.Subscript) and parent.value is node and _is_one(parent.slice):
        stack, node = True, parent
    turned = False
    while (exchanged := _exchanged(node, parents)) is not None:
        turned, node = not turned, exchanged
    parent = parents[node]
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.MatMult):
        return Use((parent.right is node) != turned, stack)
    if isinstance(parent, ast.Attribute):
        call = parents[parent]
        left = parent.attr in ("matmul", "mm") and isinstance(call, ast.Call) and call.func is parent
        return Use(turned, stack) if left else None
    if isinstance(parent, ast.keyword):
        call = parents[parent]
        is_weight = isinstance(call, ast.Call) and _name(call) == "linear" and parent.arg == "weight"
        return Use(turned, stack) if is_weight else None
    return _in_call(parent, node, turned, stack) if isinstance(parent, ast.Call) else None


def _in_call(call: ast.Call, node: ast.expr, turned: bool, stack: bool) -> Use | None:
    name, place, count = _name(call), _place(call, node), len(call.args)
    if name == "linear" and place == 1:
        return Use(turned, stack)
    if name in ("matmul", "mm", "bmm") and count <= 2 and not call.keywords:
        if name == "bmm":
            return Use(not turned, True, at_once=True) if place == count - 1 else None
        return Use((place == count - 1) != turned, stack)
    if name == "addmm" and count in (2, 3) and place == count - 1 and not call.keywords:
        return Use(not turned, stack)
    if name == "einsum" and place == 2 and count == 3 and not turned and not stack:
        return _in_einsum(call.args[0])
    return None


def _in_einsum(equation: ast.expr) -> Use | None:
    text = equation.value if isinstance(equation, ast.Constant) else None
    found = (matrix_in(text, dims) for dims in (2, 3))
    matrix = next((each for each in found if each is not None), None)
    return None if matrix is None else Use(matrix.turned, False, matrix.split)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _place(call: ast.Call, node: ast.expr) -> int:
    return next((place for place, each in enumerate(call.args) if each is node), -1)


def _is_one(index: ast.expr) -> bool:
    """Whether it picks one matrix of a stack."""
    return not isinstance(index, ast.Slice | ast.Tuple) and not (
        isinstance(index, ast.Constant) and index.value is None
    )


def _exchanged(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> ast.expr | None:
    """The expression around a matrix that exchanges its rows and columns."""
    parent = parents[node]
    if isinstance(parent, ast.Call) and _name(parent) == "t" and parent.args == [node]:
        return parent
    if isinstance(parent, ast.Call) and _name(parent) == "transpose" and parent.args[:1] == [node]:
        return parent if _are_last_two(parent.args[1:]) else None
    if not isinstance(parent, ast.Attribute):
        return None
    if parent.attr in ("T", "mT"):
        return parent
    call = parents[parent]
    if not isinstance(call, ast.Call) or call.func is not parent:
        return None
    plain = parent.attr == "t" and not call.args
    return call if plain or (parent.attr == "transpose" and _are_last_two(call.args)) else None


def _are_last_two(numbers: list[ast.expr]) -> bool:
    try:
        return {ast.literal_eval(number) for number in numbers} in _LAST_TWO
    except (ValueError, TypeError):
        return False
