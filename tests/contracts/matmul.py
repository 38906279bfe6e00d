"""What products of two computed matrices owe their callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, Call, K, N, random

SCHEMAS = {
    "matmul": "matmul(Tensor left, Tensor right, Tensor? other=None, *, float alpha=1., "
    "ScalarType? out_dtype=None) -> Tensor",
}


def samples_matmul() -> Iterator[Call]:
    for dtype in FLOATS:
        left, right = random(2, 3, 5, K, dtype=dtype), random(3, K, N, dtype=dtype)
        yield (left, right), {"out_dtype": torch.float32}
        yield (left, random(2, 1, 7, K, dtype=dtype).mT, random(7, dtype=dtype)), {"alpha": 0.5}
        yield (right.mT, left.mT, random(3, 1, 1)), {}
    yield (random(0, 3, K), random(K, N)), {}
