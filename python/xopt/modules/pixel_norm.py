"""The Euclidean norm of each channel over all pixels (ConvNeXt V2 divides by it), on `torch.ops.xopt.adaptive_pool`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from xopt.modules.adaptive_pool import pooled
from xopt.modules.chain import Call, Seen, Shape, Value, chainable
from xopt.modules.pattern import Pattern, calls, described, dtype_of, put_in_place, shape_of, step
from xopt.ops.fakes import FLOATING

_IMAGE_DIMS = (4, 5)
# What torch's functions take, by place or by name.
_FUNCTIONS: tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...] = (
    (("input", "p", "dim", "keepdim"), (torch.norm, "norm")),
    (("input", "ord", "dim", "keepdim"), (torch.linalg.vector_norm,)),
)


class FindPixelNorms(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "pool_images"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for names, functions in _FUNCTIONS:
            for node in calls(graph, *functions):
                named = {name: value for name, value in node.kwargs.items() if value is not None}
                given = dict(zip(names, node.args, strict=False)) | named
                is_last = _channels_are_last(node, given)
                if is_last is not None and given.keys() <= {*names}:
                    _replace(graph, node, given["input"], is_last, given.get("keepdim", False))


def _channels_are_last(node: Any, given: dict[str, Any]) -> bool | None:
    """Whether a norm is over the pixels of images [N, H, W, C]; None: it is over something else than pixels."""
    source: Any = given.get("input")
    over: Any = given.get("dim")
    dims = len(shape_of(source))
    is_euclidean = given.get("p", given.get("ord", 2)) in (2, "fro")
    if not is_euclidean or dims not in _IMAGE_DIMS or not isinstance(over, (tuple, list)):
        return None
    if not all(type(dim) is int for dim in over) or type(given.get("keepdim", False)) is not bool:
        return None
    pixels = sorted(dim % dims for dim in over)
    is_known = dtype_of(source) == dtype_of(node) in FLOATING and pixels in ([*range(1, dims - 1)], [*range(2, dims)])
    return pixels[0] == 1 if is_known else None


def _replace(graph: Graph, node: Node, source: Node, is_last: bool, keeps: bool) -> None:
    dims = len(shape_of(source))
    with graph.inserting_before(node):
        image = source
        if is_last:
            image = described(graph.call_method("permute", (source, 0, dims - 1, *range(1, dims - 1))))
        new = described(graph.call_function(norm_of_pixels, (dims - 2, image)))
        if is_last:
            new = described(graph.call_method("permute", (new, 0, *range(2, dims), 1)))
        if not keeps:
            new = graph.call_method("flatten", (new, 1))
    put_in_place(graph, node, new)


@step("norm of pixels")
def norm_of_pixels(dims: int, input: Tensor) -> Tensor:
    """As an image of one pixel."""
    result = pooled(dims, input, "norm", 1)
    if result is None:
        result = torch.linalg.vector_norm(input, 2, tuple(range(2, 2 + dims)), keepdim=True)
    return result


@chainable(norm_of_pixels, where=lambda node: dtype_of(node) in FLOATING)
def _norm_call(seen: Seen, dims: int, input: Value) -> Call:
    ones = [1] * dims
    return Call("adaptive_pool", (input, "norm", ones), input, lambda image: (*image[:2], *ones))


# ---- The mean of what all channels have, which such norms are divided by --------------------------------------------


def _is_of_one_pixel(node: Node) -> bool:
    shape, dtype = shape_of(node.args[0]), dtype_of(node.args[0])
    given = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    along = given.get("dim") in (-1, 3, [-1], (-1,), [3], (3,)) and given.get("keepdim") is True
    return along and len(shape) == 4 and shape[1] == shape[2] == 1 and dtype == dtype_of(node) in FLOATING


@chainable(torch.mean, "mean", where=_is_of_one_pixel)
def _mean_call(seen: Seen, input: Value, dim: Any, keepdim: bool) -> Call:
    """Of [N, 1, 1, C], which is also an image of one channel and C pixels."""

    def fits(shape: Shape) -> bool:
        return shape[1] == shape[2] == 1

    return Call("adaptive_pool", (input, "average", [1, 1]), input, lambda shape: (*shape[:-1], 1), fits=fits)
