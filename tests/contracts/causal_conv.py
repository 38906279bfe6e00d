"""What a causal convolution owes its callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, BadArgument, Call, X, ops, random

SCHEMAS = {
    "causal_conv": "causal_conv(Tensor input, Tensor weight, Tensor? bias=None, Tensor? state=None, *, "
    "bool silu=False, ScalarType? out_dtype=None) -> (Tensor out, Tensor last_state)",
}


def samples_causal_conv() -> Iterator[Call]:
    for dtype in FLOATS:
        rows, weight = random(2, 9, 20, dtype=dtype), random(20, 4, dtype=dtype)
        yield (rows, weight), {}
        across = random(2, 20, 9, dtype=dtype).transpose(1, 2)
        others = (random(20), random(2, 20, 5, dtype=dtype))
        yield (across, random(20, 4), *others), {"silu": True, "out_dtype": torch.float32}
        yield (rows, weight, None, random(2, 3, 20).mT), {}
    yield (rows[:, :0], weight, None, random(2, 20, 3)), {}


ROWS, WEIGHT, STATE = random(2, 5, 8), random(8, 4), random(2, 8, 4)

BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.causal_conv(X, WEIGHT), r"input: expected \[batch, steps, channels\], got shape \[3, 24\]"),
    (lambda: ops.causal_conv(ROWS.double(), WEIGHT), "input: expected dtype .*, got float64"),
    (lambda: ops.causal_conv(ROWS, WEIGHT[1:]), r"weight: expected \[8 channels, taps\], got shape \[7, 4\]"),
    (lambda: ops.causal_conv(ROWS, WEIGHT[:, :0]), r"weight: expected \[8 channels, taps\], got shape \[8, 0\]"),
    (lambda: ops.causal_conv(ROWS, ROWS), r"weight: expected \[8 channels, taps\], got shape \[2, 5, 8\]"),
    (lambda: ops.causal_conv(ROWS, WEIGHT, random(7)), r"bias: expected shape \[8\], got \[7\]"),
    (lambda: ops.causal_conv(ROWS, WEIGHT, None, WEIGHT), r"state: expected \[2, 8, at least 3\], got shape \[8, 4\]"),
    (
        lambda: ops.causal_conv(ROWS, WEIGHT, None, STATE[..., 2:]),
        r"state: expected \[2, 8, at least 3\], got shape \[2, 8, 2\]",
    ),
    (lambda: ops.causal_conv(ROWS, WEIGHT, out_dtype=torch.int8), "out_dtype: expected one of .*, got int8"),
]
