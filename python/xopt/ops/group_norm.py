"""The fake of GroupNorm."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Tensor, check, empty_image, fake_of


@fake_of("group_norm")
def _group_norm(
    input: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    check("group_norm", {"input": input, "weight": weight, "bias": bias, "shift": shift}, FLOATING)
    if not 3 <= input.dim() <= 5:
        raise RuntimeError(
            f"xopt::group_norm: input: expected 3 to 5 dimensions [images, channels, spatial...], got {input.dim()}"
        )
    return empty_image(input, input.shape[1], input.shape[2:], out_dtype)


@cost_of("group_norm", category="norm", kernel="group_norm")
def _group_norm_work(input: Shape, groups: int, *others: object, **options: object) -> Work:
    return Work(f"{joined(input)}, {groups} groups")
