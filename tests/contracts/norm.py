"""What norms of rows owe their callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, BadArgument, Call, K, X, ops, random

ON_XPU = True
SCHEMAS = {
    "layer_norm": "layer_norm(Tensor input, Tensor? weight=None, Tensor? bias=None, *, "
    "float eps=1.0000000000000001e-05, Tensor? residual=None, "
    "bool return_sum=False, ScalarType? out_dtype=None) -> (Tensor out, Tensor sum)",
    "rms_norm": "rms_norm(Tensor input, Tensor? weight=None, *, float eps=9.9999999999999995e-07, "
    "float weight_offset=0., Tensor? residual=None, "
    "bool return_sum=False, ScalarType? out_dtype=None) -> (Tensor out, Tensor sum)",
}


def samples_layer_norm() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(3, 5, K, dtype=dtype), random(K), random(K, dtype=dtype)), {}
        yield (random(3, K, dtype=dtype),), {"residual": random(3, K), "return_sum": True, "out_dtype": torch.float32}
    yield (random(0, K),), {}


def samples_rms_norm() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(3, 5, K, dtype=dtype), random(K)), {"weight_offset": 1.0}
        yield (random(3, K, dtype=dtype),), {"residual": random(3, K), "return_sum": True, "out_dtype": torch.float32}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.layer_norm(X.double()), "input: expected dtype .*, got float64"),
    (lambda: ops.layer_norm(random(3)[0]), "input: expected 1 to .* dimensions, got 0"),
    (lambda: ops.layer_norm(X, random(5)), rf"weight: expected shape \[{K}\], got \[5\]"),
    (lambda: ops.layer_norm(X, None, random(5)), rf"bias: expected shape \[{K}\], got \[5\]"),
    (lambda: ops.layer_norm(X, residual=X[:1]), rf"residual: expected the input's shape \[3, {K}\], got \[1, {K}\]"),
    (lambda: ops.layer_norm(X, residual=X.double()), "residual: expected dtype .*, got float64"),
    (lambda: ops.rms_norm(X, eps=-1.0), "eps: expected a number of at least 0, got -1"),
    (lambda: ops.rms_norm(X, out_dtype=torch.int8), "out_dtype: expected one of .*, got int8"),
]
