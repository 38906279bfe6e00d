"""Products by a packed weight that a forward writes out itself (`x @ self.head.weight.T`), on `torch.ops.xopt.linear`.
The weight is a layer's, or a parameter of the module's own (`own_product.py`)."""

from __future__ import annotations

import functools
import operator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from xopt.graph.steps import KIND
from xopt.modules.base import result_dtype
from xopt.modules.chain import Call, Seen, Stored, Value, chainable
from xopt.modules.fused_linear import fuse_activations, fuse_binary
from xopt.modules.linear import linear_call, times_weight
from xopt.modules.packed_parameter import PackedParameter, place_of
from xopt.modules.pattern import (
    ADD,
    MATMUL,
    Pattern,
    allow_copies,
    argument,
    calls,
    dtype_of,
    is_call,
    is_of_weights,
    only_user,
    orders,
    replace,
    shape_of,
    step,
    transposed_matrix,
)
from xopt.modules.product import finished, label
from xopt.modules.substitute import are_plain, in_place_of
from xopt.ops.fakes import FLOATING

_PRODUCTS = (*MATMUL, torch.mm, "mm")


class FindProductsByWeights(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "weights_prepack"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.linear):
            names = ("input", "weight", "bias")
            input, weight, bias = (argument(node, place, name) for place, name in enumerate(names))
            if _is_packed_matrix(weight) and dtype_of(input) in FLOATING:
                _put(graph, node, input, weight, bias, turned=False)
        for node in calls(graph, *_PRODUCTS):
            if len(node.args) == 2 and not node.kwargs:
                input, weight = node.args
                _replace_product(graph, node, input, weight, None)
        for node in calls(graph, torch.addmm, "addmm"):
            if len(node.args) == 3 and not node.kwargs:
                bias, input, weight = node.args
                _replace_product(graph, node, input, weight, bias)
        for node in calls(graph, torch.einsum):
            if len(node.args) == 3 and _is_packed(node.args[2]) and dtype_of(node.args[1]) in FLOATING:
                _replace_einsum(graph, node, *node.args)


class FuseProductsByWeights(Pattern):
    stage: ClassVar[int] = 3
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        fuse_activations(graph, product_by_weight)
        fuse_binary(graph, product_by_weight)
        fuse_activations(graph, product_by_weight)  # those that come after an addition


def _replace_product(graph: Graph, node: Node, input: Any, right: Any, bias: Any) -> None:
    if dtype_of(input) not in FLOATING or len(shape_of(input)) < 2:
        return
    weight = transposed_matrix(right)
    matrix = right if weight is None else weight
    if _is_packed_matrix(matrix) and (bias is None or _is_bias(bias, node)):
        _put(graph, node, input, matrix, bias, turned=weight is None)
    elif _is_packed(matrix) and bias is None and len(shape_of(matrix)) == len(shape_of(input)) == 3:
        replace(graph, node, products_by_stack, (input, matrix), {"turned": weight is None})


def _replace_einsum(graph: Graph, node: Node, equation: Any, input: Any, weight: Any) -> None:
    matrix = matrix_in(equation, len(shape_of(weight)))
    if matrix is not None and not matrix.split:
        _put(graph, node, input, weight, None, turned=matrix.turned)
    elif matrix is not None:
        allow_copies(node)
        replace(graph, node, einsum_by_weight, (equation, input, weight), {})


def _put(graph: Graph, node: Any, input: Node, weight: Node, bias: Any, turned: bool) -> None:
    """The step in a product's place, with a bias that is added to it alone."""
    if bias is None:
        user = only_user(node)
        found = (other for product, other in orders(user, ADD) if product is node and _is_bias(other, node))
        bias = next(found, None)
        node = node if bias is None else user
    kwargs = {"turned": turned, "out_dtype": dtype_of(node)}
    if not _is_packed(weight):
        weight, kwargs["index"] = weight.args  # type: ignore[assignment]
    replace(graph, node, product_by_weight, (input, (weight,), bias), kwargs)


def _is_bias(node: Any, product: Node) -> bool:
    fits = isinstance(node, Node) and shape_of(node) == shape_of(product)[-1:]
    return fits and dtype_of(node) in FLOATING and is_of_weights(node)


def _is_packed(node: Any) -> bool:
    return isinstance(node, Node) and node.meta.get(KIND) is PackedParameter


def _is_packed_matrix(node: Any) -> bool:
    """Or one of a stack of them."""
    if is_call(node, operator.getitem) and type(node.args[1]) is int:
        return _is_packed(node.args[0]) and len(shape_of(node)) == 2
    return _is_packed(node) and len(shape_of(node)) == 2


def _label(kwargs: dict[str, Any]) -> str:
    return label("linear")(kwargs) or "linear"


@step(_label, writes_any_dtype=True)
def product_by_weight(
    input: Tensor,
    weights: tuple[Tensor],
    bias: Tensor | None,
    *,
    turned: bool = False,
    index: int | None = None,
    **after: Any,
) -> Tensor:
    """`weights`: one, in a tuple, so that chains are told whose it is. `turned`: it is [in, out]. `index`: which of a
    stack it is."""
    weight = weights[0]
    product = times_weight(input, weight, bias, turned=turned, index=index, **after)
    if product is not NotImplemented:
        return product  # type: ignore[no-any-return]
    weight = weight if index is None else weight[index]
    product = functional.linear(input, weight.mT if turned else weight, bias)
    return finished(product, **after)


def _can_be_link(node: Node) -> bool:
    return node.kwargs.get("out_dtype") in FLOATING


@chainable(product_by_weight, where=_can_be_link)
def _call(
    seen: Seen,
    input: Value,
    weights: tuple[Stored],
    bias: Value | None,
    *,
    turned: bool = False,
    index: int | None = None,
    out_dtype: torch.dtype,
    **after: Any,
) -> Call | None:
    holder, name = seen.holder(weights[0]), weights[0].name
    weight = holder._parameters.get(name)
    place = place_of(weight)
    if place is None or type(weight) is not PackedParameter or weight.transposed != turned:
        return None
    columns = weight.columns(index)
    if columns is None or columns.computed != columns.features:
        return None
    packed = seen.packed(holder, name, place.packed)
    return linear_call(input, packed, columns.features, bias, out_dtype, columns.first, **after)


@step("linear")
def products_by_stack(input: Tensor, stack: Tensor, *, turned: bool) -> Tensor:
    """Of each matrix of rows by its own of a stack."""
    if type(stack) is PackedParameter and stack.is_stack and are_plain(input) and len(input) == len(stack):
        rows = enumerate(input.unbind())
        products = [times_weight(each, stack, None, turned=turned, index=index) for index, each in rows]
        if products and all(product is not NotImplemented for product in products):
            return torch.stack(products)
    return torch.matmul(input, stack if turned else stack.mT)


# ---- einsum ----------------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """How the second factor of an equation is a matrix that the rows of the first are multiplied by."""

    turned: bool
    """Whether its dimensions are first those of the terms and then those of the result."""
    split: int
    """Of three dimensions, how many are the matrix's first; 0: it has two."""
    terms: int
    """The dimensions that are summed over."""


@functools.lru_cache(maxsize=256)
def matrix_in(equation: Any, dims: int) -> Matrix | None:
    """None: it is none, or dimensions would have to be put in another order."""
    if not isinstance(equation, str) or dims not in (2, 3):
        return None
    factors, arrow, out = equation.replace(" ", "").replace("...", "*").partition("->")
    left, comma, right = factors.partition(",")
    once = all(len(set(each)) == len(each) for each in (left, right, out))
    if not arrow or not comma or not once or len(right) != dims or "*" in right:
        return None
    for split in range(1, dims):
        first, last = right[:split], right[split:]
        for terms, columns, turned in ((first, last, True), (last, first, False)):
            rows = left.removesuffix(terms)
            if left.endswith(terms) and rows and out == rows + columns:
                return Matrix(turned, split if dims == 3 else 0, len(terms))
    return None


@step("linear")
def einsum_by_weight(equation: str, input: Tensor, weight: Any) -> Tensor:
    product = einsum_of(equation, input, weight)
    return torch.einsum(equation, input, weight) if product is NotImplemented else product


def einsum_of(equation: Any, input: Tensor, weight: Any) -> Any:
    """NotImplemented: for torch."""
    matrix = matrix_in(equation, weight.ndim) if type(weight) is PackedParameter else None
    if matrix is None or weight.place.split != matrix.split:
        return NotImplemented
    split = matrix.split or 1
    first, last = weight.shape[:split], weight.shape[split:]
    summed, made = (first, last) if matrix.turned else (last, first)
    if input.shape[-matrix.terms :] != summed:
        return NotImplemented
    rows = input if matrix.terms == 1 else input.flatten(-matrix.terms)
    product = times_weight(rows, weight, None, turned=matrix.turned)
    return product if product is NotImplemented or len(made) == 1 else product.unflatten(-1, made)


# ---- Forwards that run as they are ----------------------------------------------------------------------------------


def product_of(input: Any, right: Any) -> Any:
    """input @ right, of a packed weight. NotImplemented: for torch."""
    if not are_plain(input) or input.ndim < 2:
        return NotImplemented
    if right.is_stack:
        return products_by_stack(input, right, turned=True) if input.ndim == 3 else NotImplemented
    return times_weight(input, right, None, turned=True) if right.ndim == 2 else NotImplemented


@in_place_of(torch.Tensor.__getitem__, switch=None)
def _one_of_a_stack(stack: Any, index: Any) -> Any:
    """Sooner than by way of torch's dispatcher."""
    is_one = type(stack) is PackedParameter and type(index) is int and stack.is_stack and place_of(stack) is not None
    return stack.kept_matrix(index) if is_one and -len(stack) <= index < len(stack) else NotImplemented


@in_place_of(torch.addmm, torch.Tensor.addmm, switch="weights_prepack")
def _addmm_of_torch(bias: Any, input: Any, weight: Any, *rest: Any, **named: Any) -> Any:
    usual = not rest and not named and are_plain(bias, input) and type(weight) is PackedParameter
    if not usual or bias.shape != weight.shape[1:]:
        return NotImplemented
    return times_weight(input, weight, bias, turned=True, out_dtype=result_dtype(input))
