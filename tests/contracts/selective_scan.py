"""What the scan of a state space owes its callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, BadArgument, Call, X, ops, random

SCHEMAS = {
    "selective_scan": "selective_scan(Tensor input, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? skip=None, "
    "Tensor? gate=None, Tensor? dt_bias=None, Tensor? state=None, *, bool softplus=False, ScalarType? out_dtype=None) "
    "-> (Tensor out, Tensor last_state)",
}


def samples_selective_scan() -> Iterator[Call]:
    for dtype in FLOATS:
        rows, states = random(2, 9, 20, dtype=dtype), random(2, 9, 4, dtype=dtype)
        yield (rows, rows, -random(20, 4).abs(), states, states), {"softplus": True}
        across = random(2, 20, 9, dtype=dtype).transpose(1, 2)
        others = (random(20), across, random(20, dtype=dtype), random(2, 20, 4, dtype=dtype))
        yield (rows, across, -random(20, 4, dtype=dtype).abs(), states, states, *others), {"out_dtype": torch.float32}
    yield (rows[:, :0], rows[:, :0], -random(20, 4).abs(), states[:, :0], states[:, :0]), {}


ROWS, STATES, A = random(2, 5, 8), random(2, 5, 3), random(8, 3)
GIVEN = (ROWS, ROWS, A, STATES, STATES)

BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.selective_scan(X, *GIVEN[1:]), r"input: expected \[batch, steps, channels\], got shape \[3, 24\]"),
    (lambda: ops.selective_scan(ROWS.double(), *GIVEN[1:]), "input: expected dtype .*, got float64"),
    (lambda: ops.selective_scan(ROWS, ROWS[:, 1:], *GIVEN[2:]), r"dt: expected shape \[2, 5, 8\], got \[2, 4, 8\]"),
    (lambda: ops.selective_scan(ROWS, ROWS, ROWS, STATES, STATES), r"a: expected \[channels, states\], got shape"),
    (lambda: ops.selective_scan(ROWS, ROWS, A[1:], STATES, STATES), r"a: expected shape \[8, 3\], got \[7, 3\]"),
    (lambda: ops.selective_scan(*GIVEN[:3], ROWS, STATES), r"b: expected shape \[2, 5, 3\], got \[2, 5, 8\]"),
    (lambda: ops.selective_scan(*GIVEN[:4], ROWS), r"c: expected shape \[2, 5, 3\], got \[2, 5, 8\]"),
    (lambda: ops.selective_scan(*GIVEN, random(7)), r"skip: expected shape \[8\], got \[7\]"),
    (lambda: ops.selective_scan(*GIVEN, gate=STATES), r"gate: expected shape \[2, 5, 8\], got \[2, 5, 3\]"),
    (lambda: ops.selective_scan(*GIVEN, dt_bias=A), r"dt_bias: expected shape \[8\], got \[8, 3\]"),
    (lambda: ops.selective_scan(*GIVEN, state=A), r"state: expected shape \[2, 8, 3\], got \[8, 3\]"),
    (lambda: ops.selective_scan(*GIVEN, out_dtype=torch.int8), "out_dtype: expected one of .*, got int8"),
]
