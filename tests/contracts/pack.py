"""What packing and unpacking of linear layers' weights owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.operands import (
    FLOATS,
    ONE,
    BadArgument,
    Call,
    K,
    N,
    Q,
    X,
    ops,
    packed,
    packed_gated,
    packed_int8,
    random,
)

ON_XPU = True
SCHEMAS = {
    "linear_pack": "linear_pack(Tensor weight, *, ScalarType dtype) -> Tensor",
    "linear_pack_gated": "linear_pack_gated(Tensor gate, Tensor up, *, ScalarType dtype) -> Tensor",
    "linear_pack_int8": "linear_pack_int8(Tensor weight, Tensor scale, Tensor? zero_point=None) -> Tensor",
    "linear_unpack": "linear_unpack(Tensor packed, int out_features, int in_features, ScalarType dtype) -> Tensor",
    "linear_unpack_gated": "linear_unpack_gated(Tensor packed, int out_features, int in_features, ScalarType dtype) "
    "-> (Tensor gate, Tensor up)",
    "linear_unpack_int8": "linear_unpack_int8(Tensor packed, int out_features, int in_features) "
    "-> (Tensor weight, Tensor scale, Tensor zero_point)",
}


def samples_linear_pack() -> Iterator[Call]:
    for source, dtype in itertools.product(FLOATS, FLOATS):
        yield (random(N, K, dtype=source),), {"dtype": dtype}
    yield (random(K, N).t(),), {"dtype": torch.bfloat16}


def samples_linear_pack_gated() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(N, K), random(N, K)), {"dtype": dtype}


def samples_linear_pack_int8() -> Iterator[Call]:
    yield (random(N, K, dtype=torch.int8), random(N)), {}
    yield (random(N, K, dtype=torch.int8), random(1), torch.tensor([3], dtype=torch.int32)), {}


def samples_linear_unpack() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (packed(dtype), N, K, dtype), {}


def samples_linear_unpack_gated() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (packed_gated(dtype), N, K, dtype), {}


def samples_linear_unpack_int8() -> Iterator[Call]:
    yield (packed_int8(), N, K), {}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.linear_pack(random(3), dtype=torch.float32), r"weight: expected two dimensions .* got shape \[3\]"),
    (lambda: ops.linear_pack(X.double(), dtype=torch.float32), "weight: expected dtype .* got float64"),
    (lambda: ops.linear_pack(X, dtype=torch.int8), "dtype: expected one of float32, bfloat16, float16, got int8"),
    (
        lambda: ops.linear_pack(torch.zeros(1, 1).expand(2**31, 2**31), dtype=torch.float32),
        r"weight: packed, its shape \[2147483648, 2147483648\] is more than fits in memory",
    ),
    (lambda: ops.linear_pack_gated(X, X.t(), dtype=torch.float32), r"up: expected shape \[3, 24\], got \[24, 3\]"),
    (lambda: ops.linear_pack_gated(X, X.long(), dtype=torch.float32), "up: expected dtype .* got int64"),
    (lambda: ops.linear_pack_int8(X, ONE), "weight: expected dtype int8, got float32"),
    (lambda: ops.linear_pack_int8(Q, ONE.expand(2)), r"scale: expected shape \[3\], got \[2\]"),
    (lambda: ops.linear_pack_int8(Q, ONE, ONE), "zero_point: expected dtype int32, got float32"),
]
