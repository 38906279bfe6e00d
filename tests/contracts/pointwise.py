"""What a few steps of arithmetic in one pass owe their callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, HEADS, BadArgument, Call, X, ops, random

ON_XPU = True
SCHEMAS = {
    "pointwise": "pointwise(Tensor[] inputs, str steps, ScalarType? out_dtype=None) -> Tensor",
}


def samples_pointwise() -> Iterator[Call]:
    for dtype in FLOATS:
        x, factor = random(2, 3, 5, 8, dtype=dtype), random(3, 1, 1)
        image = x.contiguous(memory_format=torch.channels_last)
        yield ([x], "gelu_erf:x0"), {}
        yield ([factor, image], "mul:x0:x1;silu:v0;add:v1:0.5"), {"out_dtype": dtype}
        yield ([x[:, 1:, ::2], random(8, dtype=dtype)], "div:x0:2;sub:v0:x1;abs:v1;sqrt:v2;exp:v3;softplus:v4"), {}
        yield (
            ([x, x, random(5, 1)], "leaky_relu:x0:0.1;clamp:x1:-1:1;mul:v0:v1;mul:v2:x2"),
            {"out_dtype": torch.float32},
        )
    yield ([x[:0]], "relu:x0"), {}
    yield ([random()], "tanh:x0"), {}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.pointwise([X] * 9, "relu:x0"), "inputs: expected 1 to 8 tensors, got 9"),
    (lambda: ops.pointwise([X, X.int()], "relu:x0"), r"inputs\[1\]: expected dtype .*, got int32"),
    (
        lambda: ops.pointwise([X, HEADS], "add:x0:x1"),
        r"inputs\[1\]: expected a shape that goes with those before it, got ",
    ),
    (
        lambda: ops.pointwise([X[(None,) * 7]], "relu:x0"),
        r"inputs\[0\]: expected at most 8 dimensions, got shape \[1, 1, ",
    ),
    (lambda: ops.pointwise([X], "relu:x0", torch.int8), "out_dtype: expected one of float32, .*, got int8"),
    (lambda: ops.pointwise([X], ""), "steps: expected one of add, sub, .*, got ''"),
    (lambda: ops.pointwise([X], "power:x0:2"), "steps: expected one of add, sub, .*, got 'power'"),
    (lambda: ops.pointwise([X], "relu"), "steps: expected a number in 'relu', got ''"),
    (lambda: ops.pointwise([X], "relu:x1"), "steps: expected one of 1 inputs in 'relu:x1', got 'x1'"),
    (lambda: ops.pointwise([X], "relu:x-1"), "steps: expected one of 1 inputs in 'relu:x-1', got 'x-1'"),
    (lambda: ops.pointwise([X], "relu:x0;abs:v1"), "steps: expected one of 1 steps before it in 'abs:v1', got 'v1'"),
    (lambda: ops.pointwise([X], "relu:v0"), "steps: expected one of 0 steps before it in 'relu:v0', got 'v0'"),
    (lambda: ops.pointwise([X], "add:x0:two"), "steps: expected a number in 'add:x0:two', got 'two'"),
    (lambda: ops.pointwise([X], "abs:x0:x0"), "steps: expected nothing more in 'abs:x0:x0', got 'x0'"),
    (lambda: ops.pointwise([X], ";".join(["relu:x0"] * 25)), "steps: expected at most 24 steps, got more"),
]
