"""What pooling owes its callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.contracts.operands import FLOATS, Call, random

ON_XPU = True
SCHEMAS = {
    "pool": "pool(Tensor input, str kind, *, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
    "bool ceil_mode=False, bool count_include_pad=True, int divisor=0) -> Tensor",
    "adaptive_pool": "adaptive_pool(Tensor input, str kind, int[] output_size) -> Tensor",
}


def samples_pool() -> Iterator[Call]:
    for dtype, dims, ceil_mode in itertools.product(FLOATS, (1, 2, 3), (False, True)):
        geometry = {"kernel_size": [3] * dims, "stride": [2] * dims, "padding": [1] * dims, "dilation": [1] * dims}
        x = random(2, 5, *(6, 7, 5)[:dims], dtype=dtype)
        yield (x, "max"), geometry | {"ceil_mode": ceil_mode}
        yield (x.movedim(1, -1).contiguous().movedim(-1, 1), "average"), geometry | {"count_include_pad": False}
        yield (x[:0], "average"), geometry | {"divisor": 3}


def samples_adaptive_pool() -> Iterator[Call]:
    for dtype, dims in itertools.product(FLOATS, (1, 2, 3)):
        x = random(2, 5, *(6, 7, 5)[:dims], dtype=dtype)
        yield (x, "max", [1] * dims), {}
        yield (x.movedim(1, -1).contiguous().movedim(-1, 1), "average", [3, 8, 2][:dims]), {}
        yield (x, "norm", [2] * dims), {}
        yield (x[:0], "average", [2] * dims), {}
