"""The fakes of windows of images."""

from __future__ import annotations

from collections.abc import Sequence

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import COPIED, Size, Tensor, ceil_div, check, fake_of


def _check(op: str, name: str, tensor: Tensor, dims: int) -> None:
    check(op, {name: tensor}, COPIED)
    if tensor.dim() != dims:
        raise RuntimeError(f"xopt::{op}: {name}: expected {dims} dimensions, got {tensor.dim()}")


@fake_of("window_partition")
def _window_partition(image: Tensor, window: Sequence[int], shift: Sequence[int]) -> Tensor:
    _check("window_partition", "image", image, 4)
    images, height, width, channels = image.shape
    count: list[Size] = [ceil_div(size, of) for size, of in zip((height, width), window, strict=True)]
    return image.new_empty((images, *count, *window, channels))


@fake_of("window_merge")
def _window_merge(windows: Tensor, size: Sequence[int], shift: Sequence[int]) -> Tensor:
    _check("window_merge", "windows", windows, 6)
    return windows.new_empty((windows.shape[0], *size, windows.shape[5]))


@cost_of("window_partition", category="reorder", kernel="windows")
def _window_partition_work(image: Shape, window: Sequence[int], shift: Sequence[int]) -> Work:
    return Work(f"{joined(image)}, {joined(window)}")


@cost_of("window_merge", category="reorder", kernel="windows")
def _window_merge_work(windows: Shape, size: Sequence[int], shift: Sequence[int]) -> Work:
    return Work(joined(windows))
