"""What packing and unpacking of convolutions' weights owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, Call, ops, random

ON_XPU = True
SCHEMAS = {
    "conv_pack": "conv_pack(Tensor weight, int groups=1, *, ScalarType dtype) -> Tensor",
    "conv_unpack": "conv_unpack(Tensor packed, int[] weight_size, int groups, ScalarType dtype) -> Tensor",
    "conv_pack_int8": "conv_pack_int8(Tensor weight, Tensor scale, Tensor? zero_point=None, int groups=1) -> Tensor",
    "conv_unpack_int8": "conv_unpack_int8(Tensor packed, int[] weight_size, int groups) "
    "-> (Tensor weight, Tensor scale, Tensor zero_point)",
}

# Sizes, and groups.
CONV_WEIGHTS = (((10, 3, 3, 3), 1), ((8, 1, 3), 8), ((12, 2, 1, 2, 3), 6), ((80, 4, 1, 1), 2))


def samples_conv_pack() -> Iterator[Call]:
    for dtype, (size, groups) in itertools.product(FLOATS, CONV_WEIGHTS):
        yield (random(*size, dtype=dtype), groups), {"dtype": torch.bfloat16}


def samples_conv_unpack() -> Iterator[Call]:
    for dtype, (size, groups) in itertools.product(FLOATS, CONV_WEIGHTS):
        yield (ops.conv_pack(random(*size), groups, dtype=dtype), list(size), groups, dtype), {}


def samples_conv_pack_int8() -> Iterator[Call]:
    for size, groups in CONV_WEIGHTS:
        weight, zero_points = random(*size, dtype=torch.int8), torch.arange(size[0], dtype=torch.int32)
        yield (weight, random(1)), {"groups": groups}
        yield (weight, random(size[0]), zero_points, groups), {}


def samples_conv_unpack_int8() -> Iterator[Call]:
    for size, groups in CONV_WEIGHTS:
        weight = ops.conv_pack_int8(random(*size, dtype=torch.int8), random(size[0]), None, groups)
        yield (weight, list(size), groups), {}
