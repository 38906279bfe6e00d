"""The fakes of pooling."""

from __future__ import annotations

from collections.abc import Sequence

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Size, Tensor, check, empty_image, fake_of


def _output_size(size: Size, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Size:
    free = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return free // stride + 1
    out = (free + stride - 1) // stride + 1
    return out - 1 if (out - 1) * stride >= size + padding else out


def pooled_sizes(
    sizes: Sequence[Size],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> list[Size]:
    """Of the spatial dimensions."""
    each = zip(sizes, kernel_size, stride, padding, dilation, strict=True)
    return [_output_size(*one, ceil_mode) for one in each]


@fake_of("pool")
def _pool(
    input: Tensor,
    kind: str,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int = 0,
) -> Tensor:
    _check("pool", input)
    spatial = pooled_sizes(input.shape[2:], kernel_size, stride, padding, dilation, ceil_mode)
    return empty_image(input, input.shape[1], spatial)


@fake_of("adaptive_pool")
def _adaptive_pool(input: Tensor, kind: str, output_size: Sequence[int]) -> Tensor:
    _check("adaptive_pool", input)
    return empty_image(input, input.shape[1], output_size)


def _check(op: str, input: Tensor) -> None:
    check(op, {"input": input}, FLOATING)
    if not 3 <= input.dim() <= 5:
        raise RuntimeError(
            f"xopt::{op}: input: expected 3 to 5 dimensions [images, channels, spatial...], got {input.dim()}"
        )


@cost_of("pool", category="reduction", kernel="pool")
def _pool_work(input: Shape, kind: str, *, kernel_size: Sequence[int], **options: object) -> Work:
    return Work(f"{joined(input)}, {joined(kernel_size)}")


@cost_of("adaptive_pool", category="reduction", kernel="pool")
def _adaptive_pool_work(input: Shape, kind: str, output_size: Sequence[int]) -> Work:
    return Work(f"{joined(input)}, to {joined(output_size)}")
