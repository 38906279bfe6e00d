"""The fake of pointwise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of

MOST_INPUTS = 8
MOST_STEPS = 24
"""csrc/kernels/pointwise.h"""


@fake_of("pointwise")
def _pointwise(inputs: Sequence[Tensor], steps: str, out_dtype: torch.dtype | None = None) -> Tensor:
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise RuntimeError(f"xopt::pointwise: inputs: expected 1 to {MOST_INPUTS} tensors, got {len(inputs)}")
    for place, each in enumerate(inputs):
        check("pointwise", {f"inputs[{place}]": each}, FLOATING)
    dtype = out_dtype or inputs[0].dtype
    if dtype not in FLOATING:
        expected = ", ".join(str(each).removeprefix("torch.") for each in FLOATING)
        raise RuntimeError(f"xopt::pointwise: out_dtype: expected one of {expected}, got {dtype}")
    return reduce(torch.add, (each.to(dtype) for each in inputs[1:]), inputs[0].to(dtype).abs())


@cost_of("pointwise", category="pointwise", kernel="pointwise")
def _pointwise_work(inputs: Sequence[Shape], steps: str, out_dtype: torch.dtype | None = None) -> Work:
    return Work(" and ".join(map(joined, inputs)))
