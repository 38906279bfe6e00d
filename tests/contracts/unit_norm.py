"""What normalizing rows to length 1 owes its callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, BadArgument, Call, K, X, ops, random

ON_XPU = True
SCHEMAS = {
    "unit_norm": "unit_norm(Tensor input, *, float eps=9.9999999999999998e-13, ScalarType? out_dtype=None) -> Tensor"
}


def samples_unit_norm() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(3, 5, K, dtype=dtype),), {}
        yield (random(3, K, dtype=dtype).T,), {"eps": 0.5, "out_dtype": torch.float32}
    yield (random(0, K),), {}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.unit_norm(X.double()), "input: expected dtype .*, got float64"),
    (lambda: ops.unit_norm(random(3)[0]), "input: expected 1 to .* dimensions, got 0"),
    (lambda: ops.unit_norm(X, eps=-1.0), "eps: expected a number of at least 0, got -1"),
    (lambda: ops.unit_norm(X, out_dtype=torch.int8), "out_dtype: expected one of .*, got int8"),
]
