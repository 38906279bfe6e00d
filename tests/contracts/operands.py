"""Operands that calls of many operators are made of: small, since some are made at the import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import xopt  # noqa: F401 - loads the operators

Tensor = torch.Tensor
Call = tuple[tuple[Any, ...], dict[str, Any]]
BadArgument = tuple[Callable[[], object], str]  # a call, and what its error says behind the operator's name
ops = torch.ops.xopt

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
N, K = 40, 24  # of weights: out_features, in_features


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.int8, torch.uint8):
        low = -128 if dtype == torch.int8 else 0
        return torch.randint(low, low + 256, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def packed(dtype: torch.dtype = torch.float32, n: int = N, k: int = K) -> Tensor:
    return torch.as_tensor(ops.linear_pack(random(n, k), dtype=dtype))


def packed_gated(dtype: torch.dtype = torch.float32, n: int = N, k: int = K) -> Tensor:
    return torch.as_tensor(ops.linear_pack_gated(random(n, k), random(n, k, seed=1), dtype=dtype))


def packed_int8(n: int = N, k: int = K) -> Tensor:
    return torch.as_tensor(ops.linear_pack_int8(random(n, k, dtype=torch.int8), random(n).abs()))


X = random(3, K)
Q, ONE = random(3, K, dtype=torch.int8), torch.ones(1)  # of quantized operators: an input and a scale
HEADS = random(2, 3, 5, 8)  # batch, heads, length, depth
ANGLES = random(2, 5, 8)  # cos or sin for HEADS
