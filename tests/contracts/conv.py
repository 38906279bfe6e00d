"""What convolutions of floats owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.conv_pack import CONV_WEIGHTS
from tests.contracts.operands import FLOATS, Call, ops, random

ON_XPU = True
SCHEMAS = {
    "conv": "conv(Tensor input, Tensor packed, int[] weight_size, Tensor? bias=None, *, int[] stride, int[] padding, "
    'int[] dilation, int groups=1, Tensor? scale=None, str activation="none", float alpha=0., float beta=0., '
    'str binary="none", Tensor? other=None, bool activation_last=False, ScalarType? out_dtype=None) -> Tensor',
}


def samples_conv() -> Iterator[Call]:
    for dtype, (size, groups) in itertools.product(FLOATS, CONV_WEIGHTS):
        dims = len(size) - 2
        x = random(2, size[1] * groups, *(5, 6, 7)[:dims], dtype=dtype)
        weight = ops.conv_pack(random(*size), groups, dtype=dtype)
        geometry = {"stride": [2] * dims, "padding": [1, 0] * dims, "dilation": [1] * dims, "groups": groups}
        yield (x, weight, list(size), random(size[0])), geometry
        out = ops.conv(x, weight, list(size), **geometry)
        yield (
            (x.movedim(1, -1).contiguous().movedim(-1, 1), weight, list(size)),
            geometry | {"scale": random(size[0]), "activation": "relu", "binary": "add", "other": out},
        )
        yield (x[:0], weight, list(size)), geometry | {"out_dtype": torch.float32}
