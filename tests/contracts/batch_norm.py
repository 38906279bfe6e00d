"""What batch norms owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, BadArgument, Call, ops, random

ON_XPU = True
SCHEMAS = {
    "batch_norm": "batch_norm(Tensor input, Tensor mean, Tensor variance, Tensor? weight=None, Tensor? bias=None, *, "
    'float eps=1.0000000000000001e-05, str activation="none", float alpha=0., float beta=0., str binary="none", '
    "Tensor? other=None, bool activation_last=False, ScalarType? out_dtype=None) -> Tensor",
}
IMAGE, MEAN, VARIANCE = random(2, 6, 5, 4), random(6), random(6).abs()


def samples_batch_norm() -> Iterator[Call]:
    for dtype, dims in itertools.product(FLOATS, (0, 1, 2, 3)):
        x = random(2, 6, *(6, 7, 5)[:dims], dtype=dtype)
        yield (x, MEAN, VARIANCE), {}
        last = x.movedim(1, -1).contiguous().movedim(-1, 1)
        norm = MEAN, VARIANCE, random(6), random(6, dtype=dtype)
        yield (last, *norm), {"activation": "silu", "out_dtype": torch.float32}
        yield (last, *norm), {"binary": "add", "other": last, "activation": "clamp", "alpha": -1.0, "beta": 1.0}
    yield (x[:0], MEAN, VARIANCE), {}


BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.batch_norm(IMAGE.double(), MEAN, VARIANCE), "input: expected dtype .*, got float64"),
    (lambda: ops.batch_norm(MEAN, MEAN, VARIANCE), r"input: expected 2 to 5 dimensions .*, got shape \[6\]"),
    (lambda: ops.batch_norm(IMAGE, MEAN[:5], VARIANCE), r"mean: expected shape \[6\], got \[5\]"),
    (lambda: ops.batch_norm(IMAGE, MEAN, VARIANCE.int()), "variance: expected dtype .*, got int32"),
    (lambda: ops.batch_norm(IMAGE, MEAN, VARIANCE, MEAN[:1]), r"weight: expected shape \[6\], got \[1\]"),
    (lambda: ops.batch_norm(IMAGE, MEAN, VARIANCE, bias=IMAGE), r"bias: expected shape \[6\], got \[2, 6, 5, 4\]"),
    (lambda: ops.batch_norm(IMAGE, MEAN, VARIANCE, eps=-1.0), "eps: expected a number of at least 0, got -1"),
    (lambda: ops.batch_norm(IMAGE, MEAN, VARIANCE, activation="elu"), "activation: expected one of none, relu"),
    (lambda: ops.batch_norm(IMAGE, MEAN, VARIANCE, binary="add"), "other: expected a tensor for binary='add'"),
    (
        lambda: ops.batch_norm(IMAGE, MEAN, VARIANCE, binary="add", other=MEAN),
        r"other: expected the output's shape \[2, 6, 5, 4\], got \[6\]",
    ),
]
