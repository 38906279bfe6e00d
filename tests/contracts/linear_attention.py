"""What linear attention owes its callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, BadArgument, Call, X, ops, random

SCHEMAS = {
    "linear_attention": "linear_attention(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor rate, "
    "Tensor? state=None, *, float? scale=None, float? unit_eps=None, bool corrects=True, bool state_by_columns=False, "
    "ScalarType? out_dtype=None) -> (Tensor out, Tensor last_state)",
}


def samples_linear_attention() -> Iterator[Call]:
    for dtype in FLOATS:
        query, value = random(2, 20, 2, 8, dtype=dtype), random(2, 20, 4, 9, dtype=dtype)
        decay, rate = -random(2, 20, 4).abs(), random(2, 20, 4, dtype=dtype)
        yield (query, query, value, decay, rate), {"unit_eps": 1e-6}
        yield (query[:, :1], query[:, 1:2], value[:, :1], decay[:, :1], rate[:, :1], random(2, 4, 8, 9)), {}
        yield (query, query, value, -random(2, 20, 4, 8).abs(), rate, random(2, 4, 8, 9, dtype=dtype)), {"scale": 0.1}
        options = {"corrects": False, "state_by_columns": True, "out_dtype": torch.float32}
        yield (query, query, value, decay, rate, random(2, 4, 9, 8, dtype=dtype)), options
    yield (query[:, :0], query[:, :0], value[:, :0], decay[:, :0], rate[:, :0]), {"unit_eps": 1e-6}


ROWS, NUMBERS, STATE = random(2, 5, 3, 8), random(2, 5, 3), random(2, 3, 8, 8)
GIVEN = (ROWS, ROWS, ROWS, NUMBERS, NUMBERS)

BAD_ARGUMENTS: list[BadArgument] = [
    (
        lambda: ops.linear_attention(X, *GIVEN[1:]),
        r"query: expected \[batch, steps, heads, depth\], got shape \[3, 24\]",
    ),
    (
        lambda: ops.linear_attention(ROWS, ROWS, X, *GIVEN[3:]),
        r"value: expected \[batch, steps, .* got shape \[3, 24\]",
    ),
    (lambda: ops.linear_attention(ROWS.double(), *GIVEN[1:]), "query: expected dtype .*, got float64"),
    (lambda: ops.linear_attention(ROWS, ROWS.half(), *GIVEN[2:]), "key: expected dtype float32, got float16"),
    (lambda: ops.linear_attention(ROWS, ROWS, ROWS.half(), *GIVEN[3:]), "value: expected dtype float32, got float16"),
    (
        lambda: ops.linear_attention(ROWS, ROWS[..., 1:], *GIVEN[2:]),
        r"key: expected shape \[2, 5, 3, 8\], got \[2, 5, 3, 7",
    ),
    (
        lambda: ops.linear_attention(ROWS, ROWS, ROWS[:, 1:], *GIVEN[3:]),
        r"value: expected shape \[2, 5, 3, 8\], got \[2, 4",
    ),
    (
        lambda: ops.linear_attention(ROWS[:, :, :2], *GIVEN[1:]),
        "value: expected .* multiple of the 2 heads of query, got 3",
    ),
    (
        lambda: ops.linear_attention(ROWS[:, :, :0], *GIVEN[1:]),
        "value: expected .* multiple of the 0 heads of query, got 3",
    ),
    (lambda: ops.linear_attention(*GIVEN[:3], X, NUMBERS), r"decay: expected shape \[2, 5, 3\], got \[3, 24\]"),
    (
        lambda: ops.linear_attention(*GIVEN[:3], ROWS[..., 1:], NUMBERS),
        r"decay: expected shape \[2, 5, 3, 8\], got \[2, 5",
    ),
    (lambda: ops.linear_attention(*GIVEN[:4], ROWS), r"rate: expected shape \[2, 5, 3\], got \[2, 5, 3, 8\]"),
    (lambda: ops.linear_attention(*GIVEN, STATE[..., 1:]), r"state: expected shape \[2, 3, 8, 8\], got \[2, 3, 8, 7\]"),
    (lambda: ops.linear_attention(*GIVEN, STATE[:, :, 1:], state_by_columns=True), r"state: .* got \[2, 3, 7, 8\]"),
    (lambda: ops.linear_attention(*GIVEN, out_dtype=torch.int8), "out_dtype: expected one of .*, got int8"),
    (lambda: ops.linear_attention(*GIVEN, STATE.double()), "state: expected dtype .*, got float64"),
    (lambda: ops.linear_attention(*GIVEN, scale=float("inf")), "scale: expected a finite number, got inf"),
    (lambda: ops.linear_attention(*GIVEN, unit_eps=-1.0), "unit_eps: expected a number of at least 0, got -1"),
]
