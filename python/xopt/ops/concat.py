"""The fake of concat."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import COPIED, Tensor, check, fake_of


@fake_of("concat")
def _concat(first: Tensor, second: Tensor, dim: int) -> Tensor:
    check("concat", {"first": first, "second": second}, COPIED)
    if first.dim() != second.dim():
        raise RuntimeError(f"xopt::concat: second: expected {first.dim()} dimensions, got {second.dim()}")
    return torch.cat((first, second), dim)


@cost_of("concat", category="reorder", kernel="concat")
def _concat_work(first: Shape, second: Shape, dim: int) -> Work:
    return Work(f"{joined(first)} and {joined(second)}")
