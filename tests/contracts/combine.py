"""What sums and products of two tensors owe their callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, HEADS, BadArgument, Call, X, ops, random

ON_XPU = True
SCHEMAS = {
    "combine": "combine(Tensor first, Tensor second, str how, bool relu=False) -> Tensor",
}


def samples_combine() -> Iterator[Call]:
    for dtype in FLOATS:
        x = random(2, 3, 5, 8, dtype=dtype)
        yield (x, random(2, 3, 5, 8, dtype=dtype), "add"), {"relu": True}
        yield (x.contiguous(memory_format=torch.channels_last), random(2, 3, 1, 1, dtype=dtype), "mul"), {}
        yield (random(8, dtype=dtype), x[:, 1:, ::2], "mul"), {}
        yield (random(5, 1, dtype=dtype), x, "sub"), {}
    yield (x[:0], x[:1], "add"), {}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.combine(X, X.half(), "add"), "second: expected dtype float32, got float16"),
    (lambda: ops.combine(X.int(), X.int(), "add"), "first: expected dtype .*, got int32"),
    (lambda: ops.combine(X, HEADS, "mul"), r"second: expected a shape that goes with .* \[3, 24\], got \[2, 3, 5, 8\]"),
    (lambda: ops.combine(X, X[(None,) * 7], "mul"), r"second: expected at most 8 dimensions, got shape \[1, 1, "),
    (lambda: ops.combine(X, X, "div"), "how: expected one of add, sub, mul, got 'div'"),
]
