"""The operators `torch.ops.xopt.*`: loading of the native op library, and fakes for torch.compile and torch.export.

Schemas, checks and kernels stand in csrc/ops. A fake tells the shape and dtype of a result, for sizes that may be
symbols; what depends on values (the header of a packed weight, names of activations) is checked when the op is run.

The ops have no gradient: an autograd registration would cost each call several microseconds, also under `no_grad`.
Called under grad mode with a tensor that requires a gradient, they raise an error rather than cut it off the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from xopt import _C

Tensor = torch.Tensor
Size = int | torch.SymInt
Fake = TypeVar("Fake", bound=Callable[..., object])

torch.ops.load_library(Path(_C.__file__).with_name("libxopt_ops.so"))  # type: ignore[no-untyped-call]

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_HEADER_BYTES = 64
_TILE_BYTES = 1024
_COLUMN_BYTES = 12  # of an int8 weight: scale, column sum and zero point


def _fake_of(op: str) -> Callable[[Fake], Fake]:
    def register(fake: Fake) -> Fake:
        torch.library.register_fake(f"xopt::{op}", fake)
        return fake

    return register


def _check(op: str, named: dict[str, Tensor | None], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Check the first tensor's dtype, and that all lie on its device and want no gradient; return the first."""
    first_name, first = next(iter(named.items()))
    assert first is not None
    if first.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise RuntimeError(f"xopt::{op}: {first_name}: expected dtype {expected}, got {first.dtype}")
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.device != first.device:
            raise RuntimeError(f"xopt::{op}: {name}: expected a tensor on {first.device}, got one on {tensor.device}")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(f"xopt::{op}: {name}: requires a gradient, but this op has none")
    return first


def _check_packed(op: str, packed: Tensor) -> None:
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise RuntimeError(
            f"xopt::{op}: packed: expected a uint8 tensor of one dimension, got {packed.dtype} of {packed.dim()}"
        )


def _output(op: str, input: Tensor, packed: Tensor, out_features: Size, dtype: torch.dtype) -> Tensor:
    _check_packed(op, packed)
    if input.dim() < 1:
        raise RuntimeError(f"xopt::{op}: input: expected at least one dimension, got 0")
    return input.new_empty((*input.shape[:-1], out_features), dtype=dtype)


def _ceil_div(value: Size, divisor: int) -> Size:
    return (value + divisor - 1) // divisor


def _packed(like: Tensor, out_features: Size, in_features: Size, dtype: torch.dtype, gated: bool) -> Tensor:
    """The size of csrc/kernels/packed.h's layout."""
    panels = _ceil_div(out_features, 16 if gated else 32)
    panel_bytes = _ceil_div(in_features * dtype.itemsize, 64) * 2 * _TILE_BYTES
    if dtype == torch.int8:
        panel_bytes += 32 * _COLUMN_BYTES
    return like.new_empty((_HEADER_BYTES + panels * panel_bytes,), dtype=torch.uint8)


def _matrix_sizes(op: str, name: str, weight: Tensor) -> tuple[Size, Size]:
    if weight.dim() != 2:
        raise RuntimeError(
            f"xopt::{op}: {name}: expected two dimensions [out_features, in_features], got {weight.dim()}"
        )
    return weight.shape[0], weight.shape[1]


# ---- Packing -------------------------------------------------------------------------------------------------------


@_fake_of("linear_pack")
def _linear_pack(weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    out_features, in_features = _matrix_sizes("linear_pack", "weight", weight)
    return _packed(weight, out_features, in_features, dtype, gated=False)


@_fake_of("linear_pack_gated")
def _linear_pack_gated(gate: Tensor, up: Tensor, *, dtype: torch.dtype) -> Tensor:
    out_features, in_features = _matrix_sizes("linear_pack_gated", "gate", gate)
    return _packed(gate, out_features, in_features, dtype, gated=True)


@_fake_of("linear_pack_int8")
def _linear_pack_int8(weight: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    out_features, in_features = _matrix_sizes("linear_pack_int8", "weight", weight)
    return _packed(weight, out_features, in_features, torch.int8, gated=False)


@_fake_of("linear_unpack")
def _linear_unpack(packed: Tensor, out_features: Size, in_features: Size, dtype: torch.dtype) -> Tensor:
    _check_packed("linear_unpack", packed)
    return packed.new_empty((out_features, in_features), dtype=dtype)


@_fake_of("linear_unpack_gated")
def _linear_unpack_gated(
    packed: Tensor, out_features: Size, in_features: Size, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _check_packed("linear_unpack_gated", packed)
    shape = (out_features, in_features)
    return packed.new_empty(shape, dtype=dtype), packed.new_empty(shape, dtype=dtype)


@_fake_of("linear_unpack_int8")
def _linear_unpack_int8(packed: Tensor, out_features: Size, in_features: Size) -> tuple[Tensor, Tensor, Tensor]:
    _check_packed("linear_unpack_int8", packed)
    return (
        packed.new_empty((out_features, in_features), dtype=torch.int8),
        packed.new_empty((out_features,), dtype=torch.float32),
        packed.new_empty((out_features,), dtype=torch.int32),
    )


# ---- Linear --------------------------------------------------------------------------------------------------------


@_fake_of("linear")
def _linear(
    input: Tensor,
    packed: Tensor,
    out_features: Size,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    alpha: float = 0.0,
    beta: float = 0.0,
    binary: str = "none",
    other: Tensor | None = None,
    activation_last: bool = False,
    out_dtype: torch.dtype | None = None,
    output_scale: float = 1.0,
    output_zero_point: int = 0,
) -> Tensor:
    _check("linear", {"input": input, "packed": packed, "bias": bias, "other": other}, _FLOATING)
    return _output("linear", input, packed, out_features, out_dtype or input.dtype)


@_fake_of("linear_gated")
def _linear_gated(
    input: Tensor,
    packed: Tensor,
    out_features: Size,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 0.0,
    beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    named = {"input": input, "packed": packed, "gate_bias": gate_bias, "up_bias": up_bias}
    _check("linear_gated", named, _FLOATING)
    return _output("linear_gated", input, packed, out_features, out_dtype or input.dtype)


@_fake_of("linear_norm")
def _linear_norm(
    input: Tensor,
    packed: Tensor,
    out_features: Size,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: str = "layer_norm",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    return_sum: bool = False,
) -> tuple[Tensor, Tensor]:
    named = {"input": input, "packed": packed, "bias": bias, "residual": residual}
    _check("linear_norm", named | {"norm_weight": norm_weight, "norm_bias": norm_bias}, _FLOATING)
    out = _output("linear_norm", input, packed, out_features, out_dtype or input.dtype)
    return out, torch.empty_like(out) if return_sum else out.new_empty((0,))


@_fake_of("qlinear")
def _qlinear(
    input: Tensor,
    input_scale: Tensor,
    input_zero_point: Tensor | None,
    packed: Tensor,
    out_features: Size,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    alpha: float = 0.0,
    beta: float = 0.0,
    binary: str = "none",
    other: Tensor | None = None,
    activation_last: bool = False,
    out_dtype: torch.dtype = torch.float32,
    output_scale: float = 1.0,
    output_zero_point: int = 0,
) -> Tensor:
    named = {"input": input, "input_scale": input_scale, "input_zero_point": input_zero_point, "packed": packed}
    _check("qlinear", named | {"bias": bias, "other": other}, (torch.uint8, torch.int8))
    return _output("qlinear", input, packed, out_features, out_dtype)
