"""What convolutions of int8 owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.conv_pack import CONV_WEIGHTS
from tests.contracts.operands import Call, ops, random

SCHEMAS = {
    "qconv": "qconv(Tensor input, Tensor input_scale, Tensor? input_zero_point, Tensor packed, int[] weight_size, "
    "Tensor? bias=None, *, int[] stride, int[] padding, int[] dilation, int groups=1, "
    'str activation="none", float alpha=0., float beta=0., str binary="none", '
    "Tensor? other=None, bool activation_last=False, ScalarType out_dtype=6, float output_scale=1., "
    "int output_zero_point=0) -> Tensor",
}


def samples_qconv() -> Iterator[Call]:
    for dtype, (size, groups) in itertools.product((torch.uint8, torch.int8), CONV_WEIGHTS):
        dims = len(size) - 2
        x = random(2, size[1] * groups, *(5, 6, 7)[:dims], dtype=dtype)
        weight = ops.conv_pack_int8(random(*size, dtype=torch.int8), random(size[0]).abs(), None, groups)
        geometry = {"stride": [2] * dims, "padding": [1, 0] * dims, "dilation": [1] * dims, "groups": groups}
        zero_point = torch.tensor([3], dtype=torch.int32)
        yield (x, torch.tensor([0.1]), zero_point, weight, list(size), random(size[0])), geometry
        out = ops.qconv(x, torch.tensor(0.1), None, weight, list(size), **geometry)
        yield (
            (x.movedim(1, -1).contiguous().movedim(-1, 1), torch.tensor(0.1), None, weight, list(size)),
            geometry | {"activation": "relu", "binary": "add", "other": out, "out_dtype": torch.bfloat16},
        )
        quantized = {"out_dtype": dtype, "output_scale": 9.0, "output_zero_point": 5}
        yield (x[:0], torch.tensor([0.1]), zero_point, weight, list(size)), geometry | quantized
