"""What packing and unpacking of transposed convolutions' weights owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, Call, ops, random

SCHEMAS = {
    "conv_transpose_pack": "conv_transpose_pack(Tensor weight, int groups=1, *, int[] stride, int[] dilation, "
    "ScalarType dtype) -> Tensor",
    "conv_transpose_unpack": "conv_transpose_unpack(Tensor packed, int[] weight_size, int groups, int[] stride, "
    "int[] dilation, ScalarType dtype) -> Tensor",
}

# Sizes, and groups.
TRANSPOSED = (((6, 10, 3, 3), 1), ((8, 1, 3), 8), ((12, 2, 1, 2, 3), 6))


def samples_conv_transpose_pack() -> Iterator[Call]:
    for dtype, (size, groups) in itertools.product(FLOATS, TRANSPOSED):
        taps = {"stride": [2, 3, 2][: len(size) - 2], "dilation": [1, 1, 2][: len(size) - 2]}
        yield (random(*size, dtype=dtype), groups), {**taps, "dtype": torch.bfloat16}


def samples_conv_transpose_unpack() -> Iterator[Call]:
    for (weight, groups), options in samples_conv_transpose_pack():
        taps = (options["stride"], options["dilation"])
        packed = ops.conv_transpose_pack(weight, groups, **options)
        yield (packed, list(weight.shape), groups, *taps, torch.bfloat16), {}
