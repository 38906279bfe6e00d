"""What transposed convolutions owe their callers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.contracts.conv_transpose_pack import samples_conv_transpose_pack
from tests.contracts.operands import Call, ops, random

SCHEMAS = {
    "conv_transpose": "conv_transpose(Tensor input, Tensor packed, int[] weight_size, Tensor? bias=None, *, "
    "int[] stride, int[] padding, int[] output_padding, int[] dilation, int groups=1, Tensor? scale=None, "
    'str activation="none", float alpha=0., float beta=0., str binary="none", Tensor? other=None, '
    "bool activation_last=False, ScalarType? out_dtype=None) -> Tensor",
}


def samples_conv_transpose() -> Iterator[Call]:
    for (weight, groups), options in samples_conv_transpose_pack():
        taps = {name: options[name] for name in ("stride", "dilation")}
        dims, total = weight.dim() - 2, weight.shape[1] * groups
        packed = ops.conv_transpose_pack(weight, groups, **options)
        geometry = {**taps, "padding": [1, 0, 1][:dims], "output_padding": [1] * dims, "groups": groups}
        x = random(2, weight.shape[0], *(4, 3, 5)[:dims], dtype=weight.dtype)
        out = ops.conv_transpose(x, packed, weight.shape, **geometry)
        yield (x, packed, list(weight.shape), random(total)), geometry
        yield (x, packed, list(weight.shape)), {**geometry, "binary": "add", "other": out, "out_dtype": torch.float32}
