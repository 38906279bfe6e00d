"""The fake and the cost of interpolation."""

from __future__ import annotations

from collections.abc import Sequence

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Size, Tensor, check, empty_image, fake_of


@fake_of("upsample")
def _upsample(
    input: Tensor,
    size: Sequence[Size],
    mode: str,
    *,
    align_corners: bool = False,
    scale_d: float | None = None,
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> Tensor:
    check("upsample", {"input": input}, FLOATING)
    if not 3 <= input.dim() <= 5:
        raise RuntimeError(
            f"xopt::upsample: input: expected 3 to 5 dimensions [images, channels, spatial...], got {input.dim()}"
        )
    if len(size) != input.dim() - 2:
        raise RuntimeError(f"xopt::upsample: size: expected {input.dim() - 2} numbers, got {len(size)}")
    return empty_image(input, input.shape[1], size)


@cost_of("upsample", category="pointwise", kernel="upsample")
def _upsample_work(input: Shape, size: Sequence[int], *others: object, **options: object) -> Work:
    return Work(f"{joined(input)} to {joined(size)}")
