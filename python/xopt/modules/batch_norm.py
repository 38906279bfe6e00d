"""A BatchNorm by running statistics that no product takes along (it follows a join, a sum or an activation), with what
comes after it, on `torch.ops.xopt.batch_norm`.

Images in another layout are left to torch, which has no copy to make for them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.modules import channels_last
from xopt.modules.chain import ANY_DIMS, Call, Seen, Value, always, chainable
from xopt.modules.folded_norm import norm_of
from xopt.modules.fused_linear import fuse_activations, fuse_binary
from xopt.modules.pattern import Pattern, calls, dtype_of, replace, shape_of, step
from xopt.modules.product import finished, fused_arguments, label
from xopt.ops.fakes import FLOATING

_batch_norm = torch.ops.xopt.batch_norm.default


def _label(kwargs: dict[str, Any]) -> str:
    return label("batch_norm")(kwargs) or "batch_norm"


@step(_label, writes_any_dtype=True)
def batch_norm(
    input: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    out_dtype: torch.dtype,
    other: Tensor | None = None,
    **after: Any,
) -> Tensor:
    spread = other is not None and other.shape != input.shape
    as_torch = input.dim() == 3 and channels_last.answers_as_torch()
    if spread or as_torch or input.stride(1) != 1:
        norm = (mean, variance, weight, bias)
        return finished(input, norm=norm, eps=eps, other=other, out_dtype=out_dtype, **after)
    options = after if other is None else {**after, "other": other}
    return _batch_norm(input, mean, variance, weight, bias, eps=eps, out_dtype=out_dtype, **options)  # type: ignore[no-any-return]


@chainable(batch_norm, where=always, takes_images=True)
def _batch_norm_call(
    seen: Seen,
    input: Value,
    mean: Value,
    variance: Value,
    weight: Value | None,
    bias: Value | None,
    *,
    eps: float,
    out_dtype: torch.dtype,
    other: Value | None = None,
    **after: Any,
) -> Call:
    arguments = (input, mean, variance, weight, bias, float(eps), *fused_arguments(after, other), out_dtype)
    return Call("batch_norm", arguments, input, lambda image: image, image_dims=ANY_DIMS, alike=other)


class FindBatchNorm(Pattern):
    stage: ClassVar[int] = 3  # after the products that take one along
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.batch_norm):
            source: Any = node.args[0]
            norm = norm_of(node)
            is_float = dtype_of(node) in FLOATING and dtype_of(source) in FLOATING
            if norm is not None and is_float and 2 <= len(shape_of(source)) <= 5:
                kwargs = {"eps": norm["eps"], "out_dtype": dtype_of(node)}
                replace(graph, node, batch_norm, (source, *norm["norm"]), kwargs)


class AfterBatchNorm(Pattern):
    """Behind the patterns of products, which are better places for a sum."""

    stage: ClassVar[int] = 4
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        fuse_activations(graph, batch_norm)
        fuse_binary(graph, batch_norm)
        fuse_activations(graph, batch_norm)
