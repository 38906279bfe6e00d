"""What the reading of rows of a packed weight owes its callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, BadArgument, Call, K, N, X, ops, packed, packed_gated, packed_int8

SCHEMAS = {
    "packed_rows": "packed_rows(Tensor packed, Tensor indices, int out_features, int in_features, ScalarType dtype) "
    "-> Tensor",
}


def samples_packed_rows() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (packed(dtype), torch.tensor([[3, N - 1, 0], [3, 31, 32]]), N, K, dtype), {}
    yield (packed(), torch.tensor(7, dtype=torch.int32), N, K, torch.float32), {}
    yield (packed(), torch.zeros(0, 2, dtype=torch.int64), N, K, torch.float32), {}


INDICES = torch.tensor([1, 2])
BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.packed_rows(X, INDICES, N, K, torch.float32), "packed: expected dtype uint8, got float32"),
    (lambda: ops.packed_rows(packed_gated(), INDICES, N, K, torch.float32), "packed: .* got a gated pair"),
    (lambda: ops.packed_rows(packed_int8(), INDICES, N, K, torch.float32), "dtype: expected int8, .* got float32"),
    (lambda: ops.packed_rows(packed(), INDICES, N, K, torch.float64), "dtype: expected one of .* got float64"),
    (lambda: ops.packed_rows(packed(), INDICES, N + 1, K, torch.float32), f"out_features: expected {N}, got {N + 1}"),
    (lambda: ops.packed_rows(packed(), INDICES, N, K + 1, torch.float32), f"in_features: expected {K}, got {K + 1}"),
    (lambda: ops.packed_rows(packed(), X, N, K, torch.float32), "indices: expected dtype int64 or int32, got float32"),
    (lambda: ops.packed_rows(packed(), INDICES - 2, N, K, torch.float32), rf"indices: .* in \[0, {N}\), got -1"),
    (lambda: ops.packed_rows(packed(), INDICES + N, N, K, torch.float32), rf"indices: .* got {N + 1}"),
]
