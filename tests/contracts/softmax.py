"""What softmax owes its callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, Call, K, random

ON_XPU = True
SCHEMAS = {
    "softmax": "softmax(Tensor input, *, ScalarType? out_dtype=None) -> Tensor",
}


def samples_softmax() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(3, 5, K, dtype=dtype),), {}
        yield (random(K, 3, dtype=dtype).t(),), {"out_dtype": torch.float32}
    yield (random(0, K),), {}
