"""What tensors one after the other owe their callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, HEADS, BadArgument, Call, X, ops, random

ON_XPU = True
SCHEMAS = {
    "concat": "concat(Tensor[] tensors, int dim) -> Tensor",
}


def samples_concat() -> Iterator[Call]:
    for dtype in (*FLOATS, torch.int8):
        x = random(2, 3, 5, 8, dtype=dtype)
        yield ([x, random(2, 3, 1, 8, dtype=dtype)], -2), {}
        yield ([x, random(2, 7, 3, 8, dtype=dtype).transpose(1, 2)[:, :, :2]], 2), {}
        images = [each.contiguous(memory_format=torch.channels_last) for each in (x, x[:, :2], x[:, 1:], x)]
        yield (images, 1), {}
    yield ([x[:0], x], 0), {}
    yield ([x[0, 0, 0], x[0, 0, 1]], 0), {}
    yield ([x], 3), {}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.concat([X, X.half()], 0), r"tensors\[1\]: expected dtype float32, got float16"),
    (lambda: ops.concat([X.double(), X.double()], 0), r"tensors\[0\]: expected dtype .*, got float64"),
    (
        lambda: ops.concat([X, X, HEADS], 0),
        r"tensors\[2\]: expected the shape of tensors\[0\], \[3, 24\], .* got \[2, 3, 5, 8\]",
    ),
    (lambda: ops.concat([X, X[:, :3]], 0), r"tensors\[1\]: expected .* but along dimension 0, got \[3, 3\]"),
    (lambda: ops.concat([X, X], 2), "dim: expected one of 2 dimensions, got 2"),
    (lambda: ops.concat([X, X], -3), "dim: expected one of 2 dimensions, got -3"),
    (lambda: ops.concat([X[0, 0], X[0, 0]], 0), r"tensors\[0\]: expected 1 to 8 dimensions, got shape \[\]"),
    (lambda: ops.concat([X] * 9, 0), "tensors: expected 1 to 8 tensors, got 9"),
]
