"""The fake of BatchNorm."""

from __future__ import annotations

from typing import Any

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Tensor, check, empty_image, fake_of


@fake_of("batch_norm")
def _batch_norm(
    input: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: str = "none",
    alpha: float = 0.0,
    beta: float = 0.0,
    binary: str = "none",
    other: Tensor | None = None,
    activation_last: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    named: dict[str, Tensor | None] = {"input": input, "mean": mean, "variance": variance}
    check("batch_norm", named | {"weight": weight, "bias": bias, "other": other}, FLOATING)
    if not 2 <= input.dim() <= 5:
        raise RuntimeError(
            f"xopt::batch_norm: input: expected 2 to 5 dimensions [images, channels, spatial...], got {input.dim()}"
        )
    return empty_image(input, input.shape[1], input.shape[2:], out_dtype)


@cost_of("batch_norm", category="norm", kernel="batch_norm")
def _batch_norm_work(input: Shape, *others: object, **options: Any) -> Work:
    return Work(joined(input))
