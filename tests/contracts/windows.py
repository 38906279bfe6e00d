"""What the cutting of images into windows owes its callers, and the way back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, Call, random

SCHEMAS = {
    "window_partition": "window_partition(Tensor image, int[] window, int[] shift) -> Tensor",
    "window_merge": "window_merge(Tensor windows, int[] size, int[] shift) -> Tensor",
}


def samples_window_partition() -> Iterator[Call]:
    for dtype in (*FLOATS, torch.int8):
        x = random(2, 7, 5, 6, dtype=dtype)
        yield (x, (3, 2), (-1, 1)), {}
        yield (x.movedim(-1, 1), (2, 4), (0, 0)), {}
    yield (x[:0], (4, 5), (1, 1)), {}


def samples_window_merge() -> Iterator[Call]:
    for dtype in (*FLOATS, torch.int8):
        x = random(2, 3, 3, 3, 2, 6, dtype=dtype)
        yield (x, (7, 5), (-1, 1)), {}
        yield (x.transpose(1, 2), (9, 6), (0, 0)), {}
    yield (x[:0], (4, 5), (1, 1)), {}
