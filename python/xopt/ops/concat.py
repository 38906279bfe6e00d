"""The fake of concat."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import COPIED, Tensor, check, fake_of

MOST_PARTS = 8
"""csrc/kernels/concat.h"""


@fake_of("concat")
def _concat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if not 1 <= len(tensors) <= MOST_PARTS:
        raise RuntimeError(f"xopt::concat: tensors: expected 1 to {MOST_PARTS} tensors, got {len(tensors)}")
    check("concat", {f"tensors[{place}]": each for place, each in enumerate(tensors)}, COPIED)
    dims = tensors[0].dim()
    for place, each in enumerate(tensors):
        if each.dim() != dims:
            raise RuntimeError(f"xopt::concat: tensors[{place}]: expected {dims} dimensions, got {each.dim()}")
    return torch.cat(list(tensors), dim)


@cost_of("concat", category="reorder", kernel="concat")
def _concat_work(tensors: Sequence[Shape], dim: int) -> Work:
    return Work(" and ".join(map(joined, tensors)))
