"""What attention owes its callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, HEADS, BadArgument, Call, X, ops, random

ON_XPU = True
SCHEMAS = {
    "attention": "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, *, float? scale=None, "
    "bool causal=False, int causal_offset=0, int window=0, bool one_sees_all=False, Tensor? sinks=None) "
    "-> Tensor",
}


def samples_attention() -> Iterator[Call]:
    for dtype in FLOATS:
        query, key = random(2, 4, 12, 8, dtype=dtype), random(2, 2, 9, 8, dtype=dtype)
        yield (query, key, key), {}
        yield (query[:, :, :1], key, key[..., :5]), {"scale": 0.5, "causal": True, "causal_offset": 4, "window": 3}
        yield (query.transpose(1, 2), random(2, 12, 7, 8, dtype=dtype), random(2, 12, 7, 8, dtype=dtype)), {}
    yield (query, key, key, random(2, 1, 1, 9) < 0), {}
    yield (query, key, key, random(12, 9).to(query.dtype)), {"causal": True}
    yield (query, key, key), {"causal": True, "sinks": random(4, 1, 1)}
    yield (query[:, :, :0], key, key), {}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.attention(X, HEADS, HEADS), r"query: expected four dimensions .* got shape \[3, 24\]"),
    (lambda: ops.attention(HEADS, X, HEADS), r"key: expected four dimensions .* got shape \[3, 24\]"),
    (lambda: ops.attention(HEADS, HEADS, X), r"value: expected four dimensions .* got shape \[3, 24\]"),
    (lambda: ops.attention(HEADS.double(), HEADS, HEADS), "query: expected dtype .*, got float64"),
    (lambda: ops.attention(HEADS, HEADS.half(), HEADS), "key: expected dtype float32, got float16"),
    (lambda: ops.attention(HEADS, HEADS, HEADS.half()), "value: expected dtype float32, got float16"),
    (lambda: ops.attention(HEADS, HEADS[:1], HEADS), r"key: expected shape \[2, 3, 5, 8\], got \[1, 3, 5, 8\]"),
    (lambda: ops.attention(HEADS, HEADS[..., 1:], HEADS), r"key: expected shape \[2, 3, 5, 8\], got \[2, 3, 5, 7\]"),
    (lambda: ops.attention(HEADS, HEADS, HEADS[:, :, 1:]), r"value: expected shape .* got \[2, 3, 4, 8\]"),
    (lambda: ops.attention(HEADS, HEADS[:, :2], HEADS[:, :2]), "query: expected .* multiple of the 2 heads .* got 3"),
    (lambda: ops.attention(HEADS, HEADS[:, :0], HEADS[:, :0]), "query: expected .* multiple of the 0 heads .* got 3"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, random(4)), r"mask: .* broadcasts to \[2, 3, 5, 5\], got \[4\]"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, random(2, 2, 3, 5, 5)), r"mask: expected \[1, windows, .* got \[2, 2"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, torch.zeros(5, dtype=torch.int32)), "mask: expected .* got int32"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, sinks=random(3)), r"sinks: .* to \[2, 3, 5, 1\], got \[3\]"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, sinks=random(1, 1, 3, 1, 1)), r"sinks: .* to \[2, 3, 5, 1\], got"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, sinks=HEADS > 0), "sinks: expected dtype float32 or .* got bool"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, scale=float("nan")), "scale: expected a finite number, got nan"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, window=-1), "window: expected a number of at least 0, got -1"),
]
