"""What rotary embeddings owe their callers."""

from __future__ import annotations

from collections.abc import Iterator

from tests.contracts.operands import ANGLES, FLOATS, HEADS, BadArgument, Call, X, ops, random

ON_XPU = True
SCHEMAS = {
    "rotary": "rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, *, bool interleaved=False) "
    "-> (Tensor query_out, Tensor key_out)",
}


def samples_rotary() -> Iterator[Call]:
    for dtype in FLOATS:
        query, key = random(2, 4, 5, 8, dtype=dtype), random(2, 5, 2, 8, dtype=dtype).transpose(1, 2)
        yield (query, key, random(1, 5, 8), random(2, 5, 8, dtype=dtype)), {}
        yield (query, key, random(2, 5, 6, dtype=dtype), random(1, 5, 6)), {"interleaved": True}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.rotary(X, HEADS, ANGLES, ANGLES), r"query: expected \[batch, .*\], got shape \[3, 24\]"),
    (lambda: ops.rotary(HEADS, HEADS.half(), ANGLES, ANGLES), "key: expected dtype float32, got float16"),
    (lambda: ops.rotary(HEADS, HEADS[:, :, :4], ANGLES, ANGLES), r"key: expected shape \[2, 3, 5, 8\], got"),
    (lambda: ops.rotary(HEADS, HEADS, ANGLES[..., :4], ANGLES), r"sin: expected shape \[2, 5, 4\], got \[2, 5, 8\]"),
    (lambda: ops.rotary(HEADS, HEADS, ANGLES[:, :3], ANGLES), r"cos: expected shape \[2, 5, 8\], got \[2, 3, 8\]"),
    (lambda: ops.rotary(HEADS, HEADS, ANGLES[..., :5], ANGLES), r"cos: expected an even number .* depth 8, got shape"),
    (lambda: ops.rotary(HEADS[..., :6], HEADS, ANGLES, ANGLES), r"key: expected shape"),
    (lambda: ops.rotary(HEADS[..., :6], HEADS[..., :6], ANGLES, ANGLES), r"cos: expected an even number .* depth 6"),
    (lambda: ops.rotary(HEADS, HEADS, HEADS, ANGLES), r"cos: expected \[batch, .*\], got shape"),
    (lambda: ops.rotary(HEADS, HEADS, ANGLES, HEADS), r"sin: expected \[batch, .*\], got shape"),
    (lambda: ops.rotary(HEADS[..., :7], HEADS, ANGLES, ANGLES), r"query: expected an even depth, got shape"),
]
