"""LayerNorm and RMSNorm, the latter also as models write it out, with the addition before them."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.record import EXAMPLE
from xopt.modules.chain import Call, Seen, Value, always, chainable
from xopt.modules.computed_weight import weight_of
from xopt.modules.gated_linear import gated_linear
from xopt.modules.linear import PackedProduct, has_own_packed_weight, is_output_like, linear
from xopt.modules.merged_linear import merged_linear
from xopt.modules.packed_parameter import place_of
from xopt.modules.pattern import (
    ADD,
    MULTIPLY,
    Pattern,
    argument,
    calls,
    come_before,
    dtype_of,
    is_call,
    operands,
    orders,
    replace,
    shape_of,
    step,
    without_casts,
)
from xopt.modules.product import told
from xopt.ops.fakes import FLOATING

_layer_norm = torch.ops.xopt.layer_norm.default
_linear_norm = torch.ops.xopt.linear_norm.default
_rms_norm = torch.ops.xopt.rms_norm.default


@step("layer_norm", writes_any_dtype=True)
def layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, out_dtype: torch.dtype
) -> Tensor:
    return _layer_norm(input, weight, bias, eps=eps, **told({}, input, out_dtype))[0]  # type: ignore[no-any-return]


@step("rms_norm", writes_any_dtype=True)
def rms_norm(
    input: Tensor, weight: Tensor | None, *, eps: float, weight_offset: float = 0.0, out_dtype: torch.dtype
) -> Tensor:
    options = told({"weight_offset": weight_offset} if weight_offset != 0.0 else {}, input, out_dtype)
    return _rms_norm(input, weight, eps=eps, **options)[0]  # type: ignore[no-any-return]


@step("add+layer_norm")
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    out_dtype: torch.dtype,
    return_sum: bool,
) -> tuple[Tensor, Tensor]:
    if input.shape != residual.shape:  # broadcast, which it was not when the graph was recorded
        input = input + residual
        return layer_norm(input, weight, bias, eps=eps, out_dtype=out_dtype), input
    options = told({"return_sum": True} if return_sum else {}, input, out_dtype)
    return _layer_norm(input, weight, bias, eps=eps, residual=residual, **options)  # type: ignore[no-any-return]


@step("add+rms_norm")
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype,
    return_sum: bool,
) -> tuple[Tensor, Tensor]:
    if input.shape != residual.shape:
        input = input + residual
        return rms_norm(input, weight, eps=eps, weight_offset=weight_offset, out_dtype=out_dtype), input
    options = told({"return_sum": True} if return_sum else {}, input, out_dtype)
    if weight_offset != 0.0:
        options["weight_offset"] = weight_offset
    return _rms_norm(input, weight, eps=eps, residual=residual, **options)  # type: ignore[no-any-return]


@chainable(layer_norm, where=always, is_row_major=always)
def _layer_norm_call(
    seen: Seen, input: Value, weight: Value | None, bias: Value | None, *, eps: float, out_dtype: torch.dtype
) -> Call:
    return _add_layer_norm_call(seen, input, None, weight, bias, eps=eps, out_dtype=out_dtype, return_sum=False)


@chainable(add_layer_norm, where=always, has_parts=True, is_row_major=always)
def _add_layer_norm_call(
    seen: Seen,
    input: Value,
    residual: Value | None,
    weight: Value | None,
    bias: Value | None,
    *,
    eps: float,
    out_dtype: torch.dtype,
    return_sum: bool,
) -> Call:
    arguments = (input, weight, bias, float(eps), residual, return_sum, out_dtype)
    return Call("layer_norm", arguments, input, lambda rows: rows, alike=residual)


@chainable(rms_norm, where=always, is_row_major=always)
def _rms_norm_call(
    seen: Seen, input: Value, weight: Value | None, *, eps: float, weight_offset: float = 0.0, out_dtype: torch.dtype
) -> Call:
    options: Any = {"eps": eps, "weight_offset": weight_offset, "out_dtype": out_dtype}
    return _add_rms_norm_call(seen, input, None, weight, **options, return_sum=False)


@chainable(add_rms_norm, where=always, has_parts=True, is_row_major=always)
def _add_rms_norm_call(
    seen: Seen,
    input: Value,
    residual: Value | None,
    weight: Value | None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype,
    return_sum: bool,
) -> Call:
    arguments = (input, weight, float(eps), float(weight_offset), residual, return_sum, out_dtype)
    return Call("rms_norm", arguments, input, lambda rows: rows, alike=residual)


class FindNorms(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.layer_norm):
            shape, weight, bias = (argument(node, place, name) for place, name in _LAYER_NORM_ARGUMENTS)
            if isinstance(shape, (tuple, list)) and len(shape) == 1 and _is_floating(node):
                kwargs = {"eps": argument(node, 4, "eps", 1e-5), "out_dtype": dtype_of(node)}
                replace(graph, node, layer_norm, (node.args[0], weight, bias), kwargs)
        for node in calls(graph, functional.rms_norm):
            shape, weight, eps = (argument(node, place, name) for place, name in _RMS_NORM_ARGUMENTS)
            if isinstance(shape, (tuple, list)) and len(shape) == 1 and isinstance(eps, float) and _is_floating(node):
                replace(graph, node, rms_norm, (node.args[0], weight), {"eps": eps, "out_dtype": dtype_of(node)})
        for node in calls(graph, *MULTIPLY):
            found = _rms_norm_written_out(node)
            if found is not None:
                replace(graph, last_cast(node), rms_norm, *found)


_LAYER_NORM_ARGUMENTS = ((1, "normalized_shape"), (2, "weight"), (3, "bias"))
_RMS_NORM_ARGUMENTS = ((1, "normalized_shape"), (2, "weight"), (3, "eps"))


def _is_floating(node: Node) -> bool:
    return dtype_of(node) in FLOATING and dtype_of(node.args[0]) in FLOATING


def last_cast(node: Node) -> Node:
    """A cast of a norm's result belongs to it: the kernel writes that dtype."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if user is not None and without_casts(user) is without_casts(node) and user.op != "output" else node


def _rms_norm_written_out(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """weight * (x * rsqrt(mean(x^2) + eps)), with casts wherever a model has them."""
    for weight, scaled in orders(node, MULTIPLY):
        parameter, offset = _weight(weight)
        if parameter is None:
            continue
        for x, factor in orders(without_casts(scaled), MULTIPLY):
            eps = _rsqrt_of_mean_square(without_casts(factor), without_casts(x))
            if eps is not None and shape_of(parameter) == shape_of(x)[-1:]:
                out_dtype = dtype_of(last_cast(node))
                if out_dtype in FLOATING and dtype_of(without_casts(x)) in FLOATING:
                    kwargs = {"eps": eps, "weight_offset": offset, "out_dtype": out_dtype}
                    return (without_casts(x), parameter), kwargs
    return None


def _weight(node: Any) -> tuple[Any, float]:
    """The parameter, and what is added to it (Gemma has 1 + weight)."""
    node = without_casts(node)
    for constant, rest in orders(node, ADD):
        if isinstance(constant, (int, float)):
            return _weight(rest)[0], float(constant)
    is_parameter = isinstance(node, Node) and node.op == "get_attr" and len(shape_of(node)) == 1
    return (node, 0.0) if is_parameter else (None, 0.0)


def _rsqrt_of_mean_square(node: Any, x: Any) -> float | None:
    """The eps, if a node is rsqrt(mean(x^2, -1, keepdim=True) + eps)."""
    if not is_call(node, torch.rsqrt, "rsqrt"):
        return None
    mean, eps = operands(node.args[0], ADD) or (None, None)
    if not isinstance(eps, float) or not is_call(mean, torch.mean, "mean"):
        return None
    if argument(mean, 1, "dim") not in (-1, (-1,), [-1]) or argument(mean, 2, "keepdim") is not True:
        return None
    assert mean is not None
    return eps if is_square_of(without_casts(mean.args[0]), x) else None


def is_square_of(node: Any, x: Any) -> bool:
    squared = is_call(node, torch.pow, operator.pow, "pow") and node.args[1] == 2 and without_casts(node.args[0]) is x
    product = operands(node, MULTIPLY)
    return squared or (product is not None and all(without_casts(each) is x for each in product))


class AddNorm(Pattern):
    """norm(x + residual): one pass; the sum comes along where it is wanted as well."""

    stage: ClassVar[int] = 5
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for target, fused in ((layer_norm, add_layer_norm), (rms_norm, add_rms_norm)):
            for node in calls(graph, target):
                total = node.args[0]
                found = operands(total, ADD)
                if found is None or not _can_add(total, *found) or not come_before(total, node.args[1:]):
                    continue
                wanted = set(total.users) != {node}
                kwargs = node.kwargs | {"return_sum": wanted}
                _replace_both(graph, node, total, fused, (*found, *node.args[1:]), kwargs)


class LinearNorm(Pattern):
    """norm(linear(x) + residual): while the rows of the sum are in cache."""

    stage: ClassVar[int] = 5
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for target in (layer_norm, rms_norm):
            for node in calls(graph, target):
                total = node.args[0]
                if (
                    not is_call(total, linear)
                    or total.kwargs.get("binary") != "add"
                    or total.kwargs.keys() & {"activation", "norm"}
                ):
                    continue
                if node.kwargs.get("weight_offset"):
                    continue
                wanted = set(total.users) != {node}
                if wanted and dtype_of(total) != node.kwargs["out_dtype"]:
                    continue
                if not come_before(total, node.args[1:]):
                    continue
                kwargs = {"norm": target.__name__, "eps": node.kwargs["eps"], "out_dtype": node.kwargs["out_dtype"]}
                kwargs["sum_dtype"] = dtype_of(total) if wanted else None
                parameters = (*node.args[1:], None)[:2]
                args = (*total.args, total.kwargs["other"], *parameters)
                _replace_both(graph, node, total, linear_norm, args, kwargs)


@step(lambda kwargs: f"linear+add+{kwargs['norm']}")
def linear_norm(
    module: PackedProduct,
    input: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *,
    norm: str,
    eps: float,
    out_dtype: torch.dtype,
    sum_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    place = place_of(weight_of(module))
    alone = place is not None and place.features == module.out_features
    if place is None or not alone or not is_output_like(residual, input, module.out_features):
        total = linear(module, input, binary="add", other=residual, out_dtype=sum_dtype or torch.float32)
        if norm == "layer_norm":
            return layer_norm(total, norm_weight, norm_bias, eps=eps, out_dtype=out_dtype), total
        return rms_norm(total, norm_weight, eps=eps, out_dtype=out_dtype), total
    options = told({}, input, out_dtype)
    if norm != "layer_norm":
        options["norm"] = norm
    if norm_bias is not None:
        options["norm_bias"] = norm_bias
    if sum_dtype is not None:
        options["return_sum"] = True
    bias = module._parameters["bias"]
    return _linear_norm(  # type: ignore[no-any-return]
        input, place.packed, module.out_features, bias, residual, norm_weight=norm_weight, eps=eps, **options
    )


def _has_parameter(node: Node) -> bool:
    module: Any = node.args[0]
    return has_own_packed_weight(module)


@chainable(linear_norm, where=_has_parameter, has_parts=True, is_row_major=always)
def _linear_norm_call(
    seen: Seen,
    module: PackedProduct,
    input: Value,
    residual: Value,
    norm_weight: Value | None,
    norm_bias: Value | None,
    *,
    norm: str,
    eps: float,
    out_dtype: torch.dtype,
    sum_dtype: torch.dtype | None,
) -> Call | None:
    place = place_of(weight_of(module))
    out_features = seen.attribute(module, "out_features")
    if place is None or place.features != out_features:
        return None
    product = (input, seen.packed(module, "weight", place.packed), out_features, seen.parameter(module, "bias"))
    after = (residual, norm, norm_weight, norm_bias, float(eps), out_dtype, sum_dtype is not None)
    return Call("linear_norm", (*product, *after), input, lambda rows: (*rows[:-1], out_features), alike=residual)


class NarrowNorms(Pattern):
    """A norm that only feeds products writes the dtype that they compute in, rather than one that they would cast."""

    stage: ClassVar[int] = 4
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, layer_norm, rms_norm):
            dtypes = {_product_dtype(user) for user in node.users if not is_call(user, "size")}
            if len(dtypes) == 1 and (dtype := next(iter(dtypes))) is not None:
                node.kwargs = {**node.kwargs, "out_dtype": dtype}


def _product_dtype(user: Any) -> torch.dtype | None:
    if not is_call(user, linear, merged_linear, gated_linear):
        return None
    module = user.args[0][0] if isinstance(user.args[0], (list, tuple)) else user.args[0]
    dtype: torch.dtype = weight_of(module.meta[EXAMPLE]).dtype
    # What it gives must not follow from what it is given.
    return dtype if user.kwargs.get("out_dtype") is not None else None


def _can_add(total: Node, left: Any, right: Any) -> bool:
    both = isinstance(left, Node) and isinstance(right, Node)
    return both and shape_of(left) == shape_of(right) == shape_of(total) and dtype_of(left) == dtype_of(total)


def _replace_both(graph: Graph, node: Node, total: Node, fused: Any, args: Any, kwargs: Any) -> None:
    """Puts one step that gives (norm, sum) in the place of the sum, so that all who want either come after it."""
    with graph.inserting_before(total):
        pair = graph.call_function(fused, args, kwargs)
        for place, old in ((0, node), (1, total)):
            part = graph.call_function(operator.getitem, (pair, place))
            part.meta.update(old.meta)
            old.replace_all_uses_with(part)
    graph.erase_node(node)
    graph.erase_node(total)
