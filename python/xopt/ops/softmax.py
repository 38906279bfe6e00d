"""Fake of softmax."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of, rows_of
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of


@fake_of("softmax")
def _softmax(input: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    check("softmax", {"input": input}, FLOATING)
    if input.dim() < 1:
        raise RuntimeError("xopt::softmax: input: expected at least one dimension, got 0")
    return input.new_empty(input.shape, dtype=out_dtype or input.dtype)


@cost_of("softmax", category="reduction", kernel="softmax")
def _softmax_work(input: Shape, **options: object) -> Work:
    return Work(f"{rows_of(input)}x{input[-1]}")
