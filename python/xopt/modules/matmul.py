"""Products of two activations (torch.matmul, bmm, baddbmm, einsum) on `torch.ops.xopt.matmul`, wherever a recorded
forward has them and no attention was found in them, with the scale and the addition that follow."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.autocast import autocast_dtype, is_own, without_autocast
from xopt.graph.record import EXAMPLE, told_by_result
from xopt.modules.base import result_dtype
from xopt.modules.chain import Call, Seen, Shape, Stored, Value, always, chainable
from xopt.modules.combine import are_broadcast, broadcast
from xopt.modules.linear import weight_times
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.pattern import (
    ADD,
    DIVIDE,
    MATMUL,
    MULTIPLY,
    Pattern,
    allow_copies,
    argument,
    calls,
    dtype_of,
    is_on_cpu,
    only_user,
    operands,
    orders,
    replace,
    shape_of,
    step,
    take_rounded,
)
from xopt.modules.product import is_for_torch
from xopt.modules.product_by_weight import einsum_of, product_of
from xopt.modules.substitute import are_plain, in_place_of, was_widened
from xopt.ops.fakes import FLOATING

_matmul = torch.ops.xopt.matmul.default

_SWITCH = "multiply_activations"
told_by_result.update((*(each for each in MATMUL if callable(each)), torch.Tensor.matmul, torch.Tensor.__matmul__))
told_by_result.update((torch.Tensor.bmm, torch.einsum))
_LEAST = 4  # rows, columns or terms: with fewer a product does nothing but read its factors
_WITH_INPUT = (torch.baddbmm, "baddbmm")


class FindMatmul(Pattern):
    stage: ClassVar[int] = 2  # after attention
    switch: ClassVar[str] = _SWITCH

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *MATMUL, torch.mm, "mm"):
            if len(node.args) == 2 and not node.kwargs and _are_matrices(*node.args):
                _put(graph, node, matmul, node.args, _without_autocast(node))
        for node in calls(graph, *_WITH_INPUT):
            names = ("input", "batch1", "batch2")
            tensors = tuple(argument(node, place, name) for place, name in enumerate(names))
            beta, alpha = argument(node, 3, "beta", 1), argument(node, 4, "alpha", 1)
            if _are_matrices(*tensors) and _is_number(beta) and _is_number(alpha):
                kwargs = {"beta": float(beta), "alpha": float(alpha), **_without_autocast(node)}
                replace(graph, node, baddbmm, tensors, kwargs)
        for node in calls(graph, torch.einsum):
            equation, factors = node.args[0], _factors(node.args[1:])
            if len(factors) == 2 and _are_floating(*factors) and _plan_of(equation, *factors) is not None:
                allow_copies(node)
                _put(graph, node, einsum, (equation, *factors), _without_autocast(node))


class CastFactors(Pattern):
    """What a product rounds its factors to under autocast, as steps that others may take along. Its sum with what is in
    another dtype is in the wider one."""

    stage: ClassVar[int] = 4  # before casts are
    switch: ClassVar[str] = _SWITCH

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, matmul):
            left, right, *added = node.args
            rounded = _rounded_by_autocast(node, left, right, added)
            for factor in (left, right) if rounded is not None else ():
                if dtype_of(factor) != rounded:
                    take_rounded(graph, node, factor, rounded)
            if added and dtype_of(node) != dtype_of(node.args[0]):
                node.kwargs = {**node.kwargs, "out_dtype": dtype_of(node)}


def _rounded_by_autocast(node: Node, left: Any, right: Any, added: list[Any]) -> torch.dtype | None:
    """To what it rounded factors of another dtype in the recorded call. It may have been off for a part of a forward,
    whose factors in fp32 then stay what they are."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    if dtype is None or not _are_floating(left, right):
        return None
    if added:
        return dtype if dtype in (dtype_of(left), dtype_of(right)) else None
    return dtype if dtype_of(node) == dtype else None


def _without_autocast(product: Node) -> dict[str, Any]:
    """What a step has to be told where autocast was off, for a part of a forward, or since it asks for fp32."""
    return {"in_floats": True} if torch.is_autocast_enabled("cpu") and dtype_of(product) == torch.float32 else {}


def _are_floating(*nodes: Any) -> bool:
    return all(dtype_of(node) in FLOATING for node in nodes)


def _are_matrices(*nodes: Any) -> bool:
    return _are_floating(*nodes) and all(len(shape_of(node)) >= 2 for node in nodes)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _put(graph: Graph, node: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The step in a product's place, with a factor and an addition that alone use it."""
    factor = _factor_of(node)
    if factor is not None:
        kwargs, node = {**kwargs, "alpha": factor}, only_user(node)
    user = None if target is einsum else only_user(node)
    for product, other in orders(user, ADD):
        if product is node and _are_floating(other) and shape_of(other) and shape_of(user) == shape_of(node):
            args, node = (*args, other), user
            break
    replace(graph, node, target, args, kwargs)


def _factor_of(product: Any) -> float | None:
    """What its only user multiplies it by, if that is a number."""
    user = only_user(product)
    for found, factor in orders(user, MULTIPLY):
        if found is product and _is_number(factor):
            return float(factor)
    found = operands(user, DIVIDE)
    if found is not None and found[0] is product and _is_number(found[1]) and found[1] != 0:
        return 1.0 / float(found[1])
    return None


@step("matmul")
def matmul(
    left: Tensor,
    right: Tensor,
    other: Tensor | None = None,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    in_floats: bool = False,
) -> Tensor:
    """alpha * left right + other. `out_dtype`: that of the sum, where it is not the product's. `in_floats`: whatever
    autocast says."""
    if in_floats:
        with without_autocast():
            return matmul(left, right, other, alpha=alpha, out_dtype=out_dtype)
    if type(left) is PackedParameter:
        product = weight_times(left, right)
        return _finished(torch.matmul(left, right) if product is NotImplemented else product, other, alpha)
    if not _is_for_kernel(left, right):
        return _finished(torch.matmul(left, right), other, alpha)
    dtype = result_dtype(left)
    left, right = left.to(dtype), right.to(dtype)
    if other is None:
        return _matmul(left, right, alpha=alpha)  # type: ignore[no-any-return]
    if is_for_torch(other, None) or not _fits(other, left, right):
        return _finished(_matmul(left, right, alpha=alpha), other, 1.0)
    return _matmul(left, right, other, alpha=alpha, out_dtype=torch.promote_types(dtype, other.dtype))  # type: ignore[no-any-return]


@step("matmul")
def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float, alpha: float, in_floats: bool = False
) -> Tensor:
    if in_floats:
        with without_autocast():
            return baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)
    if not _is_for_kernel(batch1, batch2):
        return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)
    other = None
    if beta:  # without it, not even what is no number in the input counts
        other = input.to(result_dtype(batch1))
        other = other if beta == 1 else other * beta
    return matmul(batch1, batch2, other, alpha=alpha)


def _finished(product: Tensor, other: Tensor | None, alpha: float) -> Tensor:
    product = product if alpha == 1.0 else product * alpha
    return product if other is None else product + other


def _is_for_kernel(left: Tensor, right: Tensor) -> bool:
    if is_for_torch(left, right) or right.dtype not in FLOATING or left.ndim < 2 or right.ndim < 2:
        return False
    if left.dtype != right.dtype and autocast_dtype(left.device) is None:
        return False
    if left.layout != torch.strided or right.layout != torch.strided or left.device.type != "cpu":
        return False
    return min(left.shape[-2], right.shape[-1], left.shape[-1]) >= _LEAST


def _fits(other: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether it broadcasts to the product, and not the other way round."""
    lead: Any = left.shape[:-2]
    if lead != right.shape[:-2]:
        lead = torch.broadcast_shapes(lead, right.shape[:-2])  # type: ignore[no-untyped-call]
    shape = (*lead, left.shape[-2], right.shape[-1])
    return _broadcasts(other.shape, shape)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(to), strict=False)
    return 1 <= len(shape) <= len(to) and all(size in (1, most) for size, most in sizes)


def _product_shape(left: Shape, right: Shape, other: Shape | None = None) -> Shape | None:
    """None: the kernel takes no such tensors."""
    if left[-1] != right[-2] or min(left[-2], right[-1], left[-1]) < _LEAST:
        return None
    if not are_broadcast(left[:-2], right[:-2]):
        return None
    shape = (*broadcast(left[:-2], right[:-2]), left[-2], right[-1])
    return shape if other is None or _broadcasts(other, shape) else None


def _is_link(node: Node) -> bool:
    """Whether the kernel takes such tensors, whose factors have one dtype, and another one at most the sum."""
    made: Any = node.meta[EXAMPLE]
    factors: Any = node.args[:2]
    if any(each.op == "get_attr" for each in factors) or not is_on_cpu(node):
        return False
    dtype = dtype_of(factors[0])
    alike = dtype == dtype_of(factors[1]) and node.kwargs.get("out_dtype", dtype) == made.dtype
    added = all(dtype_of(each) in (dtype, made.dtype) for each in node.args[2:])
    return alike and added and _product_shape(*(tuple(shape_of(each)) for each in node.args)) == tuple(made.shape)


@chainable(matmul, where=_is_link, is_row_major=always)
def _matmul_call(
    seen: Seen,
    left: Value,
    right: Value,
    other: Value | Stored | None = None,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    in_floats: bool = False,
) -> Call | None:
    """A chain knows no autocast."""
    added = None if other is None else seen.value(other)
    if added is None and other is not None:
        return None
    others = (right,) if added is None else (right, added)

    def shape(*shapes: Shape) -> Shape:
        return _product_shape(*shapes) or ()

    def fits(*shapes: Shape) -> bool:
        return _product_shape(*shapes) is not None

    return Call("matmul", (left, right, added, alpha, out_dtype), left, shape, others=others, fits=fits)


# ---- einsum ----------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """An equation of two factors as a product of matrices: how many of the leading dimensions, and of those of rows,
    columns and terms, there are, and the order in which factors have to stand, and the result comes out."""

    counts: tuple[int, int, int, int]
    left: tuple[int, ...]
    right: tuple[int, ...]
    out: tuple[int, ...]


def _factors(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """They may stand in one argument, as Longformer has them."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def _plan_of(equation: Any, left: Any, right: Any) -> _Plan | None:
    """Of two tensors, or their nodes."""
    if not isinstance(equation, str):
        return None
    dims = (len(shape_of(each)) if isinstance(each, Node) else each.ndim for each in (left, right))
    return _plan(equation, *dims)


@functools.lru_cache(maxsize=256)
def _plan(equation: str, left_dims: int, right_dims: int) -> _Plan | None:
    """None for what is no product of matrices: sums over one factor alone, diagonals, an outer product."""
    factors, arrow, out = equation.replace(" ", "").partition("->")
    left, comma, right = factors.partition(",")
    if not arrow or not comma:
        return None
    if "..." in equation:
        # Letters for what the dots stand for, where that is as much for both factors.
        dots = left_dims - len(left.replace("...", ""))
        if not all("..." in each for each in (left, right, out)) or dots != right_dims - len(right.replace("...", "")):
            return None
        unused = "".join(sorted(set(string.ascii_letters) - set(equation)))[: max(dots, 0)]
        left, right, out = (each.replace("...", unused) for each in (left, right, out))
    if not all(each.isalpha() and len(set(each)) == len(each) for each in (left, right, out)):
        return None
    if (len(left), len(right)) != (left_dims, right_dims):
        return None
    lead = [each for each in left if each in right and each in out]
    rows = [each for each in left if each not in right]
    columns = [each for each in right if each not in left]
    terms = [each for each in left if each in right and each not in out]
    if not rows or not columns or not terms or set(out) != {*lead, *rows, *columns}:
        return None
    made = [*lead, *rows, *columns]
    return _Plan(
        (len(lead), len(rows), len(columns), len(terms)),
        tuple(left.index(each) for each in (*lead, *rows, *terms)),
        tuple(right.index(each) for each in (*lead, *terms, *columns)),
        tuple(made.index(each) for each in out),
    )


@step("matmul")
def einsum(equation: str, left: Tensor, right: Tensor, *, alpha: float = 1.0, in_floats: bool = False) -> Tensor:
    if in_floats:
        with without_autocast():
            return einsum(equation, left, right, alpha=alpha)
    plan = _plan_of(equation, left, right)
    if plan is None or is_for_torch(left, right):
        return _finished(torch.einsum(equation, left, right), None, alpha)
    lead, rows, columns, terms = plan.counts
    lefts, rights = left.permute(plan.left), right.permute(plan.right)
    row_sizes, column_sizes = lefts.shape[lead : lead + rows], rights.shape[lead + terms :]
    if lefts.shape[lead + rows :] != rights.shape[lead : lead + terms]:  # one is broadcast
        return _finished(torch.einsum(equation, left, right), None, alpha)
    lefts = _merged(lefts, lead, rows, terms)
    rights = _merged(rights, lead, terms, columns)
    result = matmul(lefts, rights, alpha=alpha)
    if rows != 1 or columns != 1:
        result = result.reshape(*result.shape[:lead], *row_sizes, *column_sizes)
    return result.permute(plan.out)


def _merged(factor: Tensor, lead: int, rows: int, columns: int) -> Tensor:
    """With its dimensions of rows as one, and those of columns."""
    if rows == columns == 1:
        return factor
    sizes = factor.shape
    return factor.reshape(*sizes[:lead], math.prod(sizes[lead : lead + rows]), math.prod(sizes[lead + rows :]))


# ---- Forwards that run as they are ----------------------------------------------------------------------------------


@in_place_of(
    *(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__),
    *(torch.bmm, torch.Tensor.bmm, torch.mm, torch.Tensor.mm),
    switch=_SWITCH,
)
def _matmul_of_torch(left: Any, right: Any, *rest: Any, **named: Any) -> Any:
    if type(left) is PackedParameter and are_plain(right) and not rest and not named:
        return weight_times(left, right)
    if type(right) is PackedParameter and are_plain(left) and not rest and not named:
        return product_of(left, right)
    usual = not rest and not named and are_plain(left, right)
    if not usual or not _is_for_kernel(left, right):
        return NotImplemented
    return matmul(left, right, in_floats=_asks_for_floats(left, right))


def _asks_for_floats(left: Tensor, right: Tensor) -> bool:
    return is_own() and was_widened(left) and right.dtype == torch.float32


@in_place_of(torch.baddbmm, torch.Tensor.baddbmm, switch=_SWITCH)
def _baddbmm_of_torch(
    input: Any, batch1: Any, batch2: Any, *rest: Any, beta: Any = 1, alpha: Any = 1, **named: Any
) -> Any:
    if rest or named or not are_plain(input, batch1, batch2):
        return NotImplemented
    if is_for_torch(input, None) or not _is_for_kernel(batch1, batch2):
        return NotImplemented
    return baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)


@in_place_of(torch.einsum, switch=_SWITCH)
def _einsum_of_torch(equation: Any, *given: Any, **named: Any) -> Any:
    factors = _factors(given)
    if named or len(factors) != 2:
        return NotImplemented
    if are_plain(factors[0]) and type(factors[1]) is PackedParameter:
        return einsum_of(equation, *factors)
    if not are_plain(*factors) or _plan_of(equation, *factors) is None:
        return NotImplemented
    return einsum(equation, *factors, in_floats=_asks_for_floats(*factors))
