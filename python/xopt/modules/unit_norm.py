"""Rows divided by their length (SwinV2's and XCiT's queries and keys), on `torch.ops.xopt.unit_norm`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.modules.base import has_kernels
from xopt.modules.chain import Call, Seen, Value, always, chainable
from xopt.modules.gradients import wants_gradient
from xopt.modules.pattern import Pattern, argument, calls, dtype_of, replace, shape_of, step
from xopt.ops.fakes import FLOATING

_unit_norm = torch.ops.xopt.unit_norm.default


class FindUnitNorm(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.normalize):
            input: Any = argument(node, 0, "input")
            dims, out = len(shape_of(input)), argument(node, 4, "out")
            power, dim, eps = (
                argument(node, place, name, default)
                for place, name, default in ((1, "p", 2.0), (2, "dim", 1), (3, "eps", 1e-12))
            )
            along_last = dims > 0 and type(dim) is int and dim in (-1, dims - 1)
            known = power == 2 and type(eps) is float and eps >= 0 and out is None
            if along_last and known and dtype_of(node) == dtype_of(input) in FLOATING:
                replace(graph, node, unit_norm, (input,), {"eps": eps, "out_dtype": dtype_of(node)})


@step("unit_norm", writes_any_dtype=True)
def unit_norm(input: Tensor, *, eps: float, out_dtype: torch.dtype) -> Tensor:
    if not has_kernels(input.device) or wants_gradient(input):
        return functional.normalize(input, dim=-1, eps=eps).to(out_dtype)
    return _unit_norm(input, eps=eps, out_dtype=out_dtype)  # type: ignore[no-any-return]


@chainable(unit_norm, where=always, is_row_major=always)
def _unit_norm_call(seen: Seen, input: Value, *, eps: float, out_dtype: torch.dtype) -> Call:
    return Call("unit_norm", (input, eps, out_dtype), input, lambda shape: shape)
