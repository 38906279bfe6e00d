"""What group norms owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, Call, random

ON_XPU = True
SCHEMAS = {
    "group_norm": "group_norm(Tensor input, int groups, Tensor? weight=None, Tensor? bias=None, *, "
    'float eps=1.0000000000000001e-05, str activation="none", ScalarType? out_dtype=None, '
    "Tensor? shift=None) -> Tensor",
}


def samples_group_norm() -> Iterator[Call]:
    for dtype, dims in itertools.product(FLOATS, (1, 2, 3)):
        x = random(2, 6, *(6, 7, 5)[:dims], dtype=dtype)
        yield (x, 3), {}
        last = x.movedim(1, -1).contiguous().movedim(-1, 1)
        yield (last, 2, random(6), random(6, dtype=dtype)), {"activation": "silu", "out_dtype": torch.float32}
        yield (x, 3), {"shift": random(2, 6, dtype=dtype)}
        yield (last, 2), {"shift": random(6, 1).T}
    yield (x[:0], 1), {}
