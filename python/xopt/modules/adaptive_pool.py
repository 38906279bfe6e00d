"""Pooling to a given size, of which most is one pixel, where images have their channels last in memory, on
`torch.ops.xopt.adaptive_pool`.

Modules are replaced, and calls of torch's functions are found in recorded forwards, means of all pixels among them.
Images in another layout, and those that want a gradient, are left to torch.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.nn import functional
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.record import EXAMPLE
from xopt.modules.base import Replacement
from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.pattern import Pattern, argument, calls, described, dtype_of, put_in_place, replace, shape_of, step
from xopt.modules.pool import ImagePool, for_kernel, replaced_kind
from xopt.modules.views import are_rows, flattened, permuted
from xopt.ops.fakes import FLOATING

_DIMS: dict[type[nn.Module], int] = {
    **{nn.AdaptiveMaxPool1d: 1, nn.AdaptiveMaxPool2d: 2, nn.AdaptiveMaxPool3d: 3},
    **{nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3},
}
_adaptive_pool = torch.ops.xopt.adaptive_pool.default


def _name_of(module: nn.Module) -> str:
    return "max" if isinstance(module, _AdaptiveMaxPoolNd) else "average"


def adaptive_pool(module: Any, input: torch.Tensor) -> torch.Tensor:
    """What a replaced module computes."""
    kind, dims = replaced_kind(module, _DIMS)
    result = pooled(dims, input, _name_of(module), module.output_size)
    return kind.forward(module, input) if result is None else result


def pooled(dims: int, input: torch.Tensor, kind: str, output_size: Any) -> torch.Tensor | None:
    """None: it is left to torch."""
    if output_size is None or not for_kernel(input, dims):
        return None
    wanted = _numbers(dims, output_size)
    sizes = [own if each is None else each for own, each in zip(input.shape[2:], wanted, strict=False)]
    if len(wanted) != dims or min(*sizes, *input.shape[2:]) < 1:
        return None
    return _adaptive_pool(input, kind, sizes)  # type: ignore[no-any-return]


def _numbers(dims: int, output_size: Any) -> list[int | None]:
    """One a dimension; None: as many as the input has."""
    given = list(output_size) if isinstance(output_size, (tuple, list)) else [output_size]
    return given * dims if len(given) == 1 else given


def _has_numbers(node: Node) -> bool:
    module: Any = node.args[0]
    _, dims = replaced_kind(module.meta[EXAMPLE], _DIMS)
    return dtype_of(node) in FLOATING and _are_numbers(_numbers(dims, module.meta[EXAMPLE].output_size), dims)


def _are_numbers(sizes: list[int | None], dims: int) -> bool:
    return len(sizes) == dims and all(type(size) is int and size > 0 for size in sizes)


@chainable(adaptive_pool, where=_has_numbers, takes_images=True)
def _adaptive_pool_call(seen: Seen, module: Any, input: Value) -> Call | None:
    _, dims = replaced_kind(module, _DIMS)
    return _call(dims, _name_of(module), input, seen.attribute(module, "output_size"))


def _call(dims: int, kind: str, input: Value, output_size: Any) -> Call | None:
    sizes = _numbers(dims, output_size)
    if not _are_numbers(sizes, dims):
        return None
    arguments = (input, kind, sizes)
    return Call("adaptive_pool", arguments, input, lambda image: (*image[:2], *sizes), image_dims=dims + 2)


class AdaptiveMaxPool(ImagePool, Replacement, _AdaptiveMaxPoolNd):
    source: ClassVar[type[nn.Module]] = _AdaptiveMaxPoolNd
    switch: ClassVar[str] = "pool_images"
    kinds = _DIMS
    compute = staticmethod(adaptive_pool)


class AdaptiveAveragePool(ImagePool, Replacement, _AdaptiveAvgPoolNd):
    source: ClassVar[type[nn.Module]] = _AdaptiveAvgPoolNd
    switch: ClassVar[str] = "pool_images"
    kinds = _DIMS
    compute = staticmethod(adaptive_pool)


# ---- Functions in recorded forwards ---------------------------------------------------------------------------------

_MAX = (functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d)
_AVERAGE = (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d)


class FindAdaptivePools(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "pool_images"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, torch.mean, "mean"):
            dims = _dims_of_mean(node, of_rows=False)
            if dims is not None:
                _pool_in_place_of_mean(graph, node, dims, mean_of_pixels)
        for kind, functions in (("max", _MAX), ("average", _AVERAGE)):
            for dims, function in enumerate(functions, 1):
                for node in calls(graph, function):
                    given = dict(zip(("input", "output_size"), node.args, strict=False)) | node.kwargs
                    indices = given.pop("return_indices", False)
                    if given.keys() == {"input", "output_size"} and not indices and dtype_of(node) in FLOATING:
                        size = given["output_size"]
                        size = tuple(size) if isinstance(size, list) else size
                        replace(graph, node, pool_to, (dims, kind, given["input"], size), {})


class FindMeansOfRows(Pattern):
    """As of a transformer's tokens, behind its last norm."""

    stage: ClassVar[int] = 6  # when it is known what is rows
    switch: ClassVar[str] = "pool_images"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, torch.mean, "mean"):
            dims = _dims_of_mean(node, of_rows=True)
            if dims is not None and are_rows(argument(node, 0, "input")):
                _pool_in_place_of_mean(graph, node, dims, mean_of_rows)


def _dims_of_mean(node: Any, of_rows: bool) -> int | None:
    """How many spatial dimensions a mean goes over, if that is all that an image has, whose channels are before them
    or, where it is of rows, behind them. Of a sequence's layout only that is known."""
    source = argument(node, 0, "input")
    over, keeps = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    all_dims = len(shape_of(source))
    over = (over,) if type(over) is int else over
    if not (3 if of_rows else 4) <= all_dims <= 5 or type(keeps) is not bool or not isinstance(over, (tuple, list)):
        return None
    if not all(type(dim) is int for dim in over) or node.kwargs.keys() - {"input", "dim", "keepdim"}:
        return None
    spatial = range(1, all_dims - 1) if of_rows else range(2, all_dims)
    is_spatial = sorted(dim % all_dims for dim in over) == [*spatial]
    return all_dims - 2 if is_spatial and dtype_of(source) == dtype_of(node) in FLOATING else None


def _pool_in_place_of_mean(graph: Graph, node: Node, dims: int, mean: Any) -> None:
    keeps = argument(node, 2, "keepdim", False)
    with graph.inserting_before(node):
        new = described(graph.call_function(mean, (dims, argument(node, 0, "input"))))
        if mean is mean_of_rows and keeps:
            for _ in range(dims):
                new = described(graph.call_method("unsqueeze", (new, 1)))
        elif mean is mean_of_pixels and not keeps:
            new = graph.call_method("flatten", (new, 1))
    put_in_place(graph, node, new)


@step("adaptive_pool")
def mean_of_rows(dims: int, input: torch.Tensor) -> torch.Tensor:
    """[images, ..., channels] as [images, channels]."""
    result = pooled(dims, input.movedim(-1, 1), "average", 1)
    return input.mean(tuple(range(1, 1 + dims))) if result is None else result.flatten(1)


@chainable(mean_of_rows, where=lambda node: dtype_of(node) in FLOATING)
def _mean_of_rows_call(seen: Seen, dims: int, input: Value) -> Call | None:
    image = seen.call(permuted(input, (0, dims + 1, *range(1, dims + 1))))
    pool = _call(dims, "average", image, 1)
    return None if pool is None else flattened(seen.call(pool), 1)


@step("adaptive_pool")
def mean_of_pixels(dims: int, input: torch.Tensor) -> torch.Tensor:
    """The mean of each channel, as an image of one pixel."""
    result = pooled(dims, input, "average", 1)
    return input.mean(tuple(range(2, 2 + dims)), keepdim=True) if result is None else result


@chainable(mean_of_pixels, where=lambda node: dtype_of(node) in FLOATING, takes_images=True)
def _mean_call(seen: Seen, dims: int, input: Value) -> Call | None:
    return _call(dims, "average", input, 1)


def _goes_to_numbers(node: Node) -> bool:
    dims, _, _, output_size = node.args
    assert isinstance(dims, int), "it is what the pattern has put there"
    return dtype_of(node) in FLOATING and _are_numbers(_numbers(dims, output_size), dims)


@step("adaptive_pool")
def pool_to(dims: int, kind: str, input: torch.Tensor, output_size: Any) -> torch.Tensor:
    result = pooled(dims, input, kind, output_size)
    if result is not None:
        return result
    function: Any = (_MAX if kind == "max" else _AVERAGE)[dims - 1]
    return function(input, output_size)  # type: ignore[no-any-return]


@chainable(pool_to, where=_goes_to_numbers, takes_images=True)
def _pool_to_call(seen: Seen, dims: int, kind: str, input: Value, output_size: Any) -> Call | None:
    return _call(dims, kind, input, output_size)
