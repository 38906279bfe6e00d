"""The fake of the scan of a state space."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of


@fake_of("selective_scan")
def _selective_scan(
    input: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    softplus: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    series = {"input": input, "dt": dt, "b": b, "c": c, "gate": gate}
    others = {"a": a, "skip": skip, "dt_bias": dt_bias, "state": state}
    check("selective_scan", series | others, FLOATING)
    if input.dim() != 3:
        raise RuntimeError(f"xopt::selective_scan: input: expected [batch, steps, channels], got {input.dim()} dims")
    if a.dim() != 2:
        raise RuntimeError(f"xopt::selective_scan: a: expected [channels, states], got {a.dim()} dims")
    out = input.new_empty(input.shape, dtype=out_dtype or input.dtype)
    return out, input.new_empty((input.shape[0], *a.shape), dtype=torch.float32)


@cost_of("selective_scan", category="attention", kernel="selective_scan")
def _selective_scan_work(input: Shape, dt: Shape, a: Shape, *others: object, **options: object) -> Work:
    """An exponential counts as one, beside what the states are multiplied by."""
    batch, steps, channels = input
    return Work(f"{joined(input)} x {a[1]}", 7 * batch * steps * channels * a[1])
