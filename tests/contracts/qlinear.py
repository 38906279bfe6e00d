"""What linear layers of int8 owe their callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.operands import ONE, BadArgument, Call, K, N, Q, X, ops, packed, packed_int8, random

ON_XPU = True
SCHEMAS = {
    "qlinear": "qlinear(Tensor input, Tensor input_scale, Tensor? input_zero_point, Tensor packed, int out_features, "
    'Tensor? bias=None, *, str activation="none", float alpha=0., float beta=0., str binary="none", '
    "Tensor? other=None, bool activation_last=False, ScalarType out_dtype=6, float output_scale=1., "
    "int output_zero_point=0) -> Tensor",
}


def samples_qlinear() -> Iterator[Call]:
    for dtype in (torch.uint8, torch.int8):
        x = random(2, 3, K, dtype=dtype)
        zero_point = torch.tensor([3], dtype=torch.int32)
        yield (x, torch.tensor([0.1]), zero_point, packed_int8(), N, random(N)), {"activation": "relu"}
        yield (x, random(6).abs(), zero_point.expand(6), packed_int8(), N), {"binary": "add", "other": random(2, 3, N)}
        yield (x, torch.tensor(0.1), None, packed_int8(), N), {"out_dtype": torch.int8, "output_scale": 9.0}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.qlinear(X, ONE, None, packed_int8(), N), "input: expected dtype uint8 or int8, got float32"),
    (lambda: ops.qlinear(Q, ONE, None, packed(), N), "packed: expected a packed weight of int8, got one of float32"),
    (lambda: ops.qlinear(Q, ONE.double(), None, packed_int8(), N), "input_scale: expected dtype float32, got float64"),
    (lambda: ops.qlinear(Q, ONE.expand(2), None, packed_int8(), N), r"input_scale: expected shape \[1\] or \[3\], .*2"),
    (lambda: ops.qlinear(Q, ONE.expand(3, 1), None, packed_int8(), N), r"input_scale: expected shape .* got \[3, 1\]"),
    (lambda: ops.qlinear(Q, ONE, ONE, packed_int8(), N), "input_zero_point: expected dtype int32, got float32"),
    (lambda: ops.qlinear(Q, ONE, ONE.int().expand(5), packed_int8(), N), "input_zero_point: expected shape .*5"),
    (lambda: ops.qlinear(Q, ONE, None, packed_int8(), N, out_dtype=torch.int32), "out_dtype: expected one of .* int32"),
]
