"""What upsampling owes its callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.contracts.operands import FLOATS, Call, random

ON_XPU = True
SCHEMAS = {
    "upsample": "upsample(Tensor input, int[] size, str mode, *, bool align_corners=False, float? scale_d=None, "
    "float? scale_h=None, float? scale_w=None) -> Tensor",
}


def samples_upsample() -> Iterator[Call]:
    for dtype, dims in itertools.product(FLOATS, (1, 2, 3)):
        x = random(2, 6, *(6, 7, 5)[:dims], dtype=dtype)
        yield (x, (9, 3, 10)[:dims], "nearest"), {}
        yield (x.movedim(1, -1).contiguous().movedim(-1, 1), (9, 3, 10)[:dims], "linear"), {"align_corners": True}
    yield (x[:0], (4, 5, 6), "linear"), {"scale_d": 2.0, "scale_w": 1.2}
