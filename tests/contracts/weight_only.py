"""What linear layers with weights of integers and inputs of floats owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, Call, K, N, ops, random

ON_XPU = True
SCHEMAS = {
    "linear_pack_weight_only": "linear_pack_weight_only(Tensor weight, Tensor scale, Tensor? zero_point=None, *, "
    "int bits, int group_size, bool gated=False) -> Tensor",
    "linear_weight_only": "linear_weight_only(Tensor input, Tensor packed, int out_features, Tensor? bias=None, "
    'Tensor? up_bias=None, *, bool gated=False, str activation="none", float alpha=0., float beta=0., '
    'str binary="none", Tensor? other=None, bool activation_last=False, ScalarType? out_dtype=None) -> Tensor',
}


def weight_only_samples(gated: bool = False) -> Iterator[tuple[Call, int]]:
    """Arguments of linear_pack_weight_only, and in_features."""
    for bits, (k, group) in itertools.product((4, 8), ((K, K), (70, 32))):
        codes = (random(N, k, dtype=torch.int8) >> (8 - bits)).to(torch.int8)
        scale = random(N, -(-k // group)).abs()
        options = {"bits": bits, "group_size": group, "gated": gated}
        yield ((codes, scale), options), k
        yield ((codes, scale, torch.full_like(scale, 3, dtype=torch.int32)), options), k


def samples_linear_pack_weight_only() -> Iterator[Call]:
    for gated in (False, True):
        yield from (call for call, _ in weight_only_samples(gated))


def samples_linear_weight_only() -> Iterator[Call]:
    for ((args, kwargs), k), dtype in itertools.product(weight_only_samples(), FLOATS):
        weight = ops.linear_pack_weight_only(*args, **kwargs)
        yield (random(2, 3, k, dtype=dtype), weight, N, random(N)), {"activation": "relu"}
        yield (random(3, k, dtype=dtype), weight, N), {"binary": "add", "other": random(N), "out_dtype": torch.float32}
    for (args, kwargs), k in weight_only_samples(gated=True):
        weight = ops.linear_pack_weight_only(*args, **kwargs)
        yield (random(3, k), weight, N // 2, random(N // 2), random(N // 2)), {"gated": True, "activation": "silu"}
