"""Who replays an int8 product or convolution: oneDNN's quantized operators, with their weights prepacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xopt.bench.errors import UnavailableError
from xopt.bench.peers import find_op, require_onednn
from xopt.bench.replay_contender import ONEDNN_ACTIVATIONS, Contender
from xopt.bench.replay_operands import Named

Tensor = torch.Tensor
Operands = tuple[Any, ...]


def int8_contenders(kernel: dict[str, Any], make: Callable[[], Named], all_instances: bool) -> list[Contender]:
    if kernel["operator"] == "xopt::qlinear":
        return [Contender("oneDNN", lambda: _linear_operands(make()), _run)]
    if kernel["operator"] == "xopt::qconv":
        return [Contender("oneDNN", lambda: _conv_operands(make()), _run)]
    return []


def _input(named: Named) -> tuple[Tensor, float, int]:
    """With its scale and its zero point."""
    require_onednn("int8")
    values, scale, zero = named["input"], named["input_scale"], named.get("input_zero_point")
    if scale.numel() != 1:
        raise UnavailableError("oneDNN's operators in torch have one scale for the whole input")
    if values.dtype != torch.uint8:
        raise UnavailableError("oneDNN's operators in torch take unsigned inputs")
    return values, float(scale), 0 if zero is None else int(zero)


def _after(named: Named) -> Operands:
    """What follows the product: output scale, zero point and dtype, then the activation."""
    activation = named.get("activation", "none")
    if named.get("binary", "none") != "none" or activation not in ONEDNN_ACTIVATIONS:
        raise UnavailableError("what follows the product is not what oneDNN's operators in torch have")
    name, kind = ONEDNN_ACTIVATIONS[activation]
    to = named.get("output_scale", 1.0), named.get("output_zero_point", 0), named.get("out_dtype", torch.float32)
    return *to, name, [], kind


def _linear_operands(named: Named) -> Operands:
    values, scale, zero = _input(named)
    unpack = find_op("xopt.linear_unpack_int8.default")
    weight, weight_scale, weight_zero = unpack(named["packed"], int(named["out_features"]), values.shape[-1])
    packed = find_op("onednn.qlinear_prepack.default")(weight, [values.numel() // values.shape[-1], values.shape[-1]])
    op = find_op("onednn.qlinear_pointwise.default")
    return op, values, scale, zero, packed, weight_scale, weight_zero, named.get("bias"), *_after(named)


def _run(operands: Operands) -> Tensor:
    op, *arguments = operands
    return op(*arguments)  # type: ignore[no-any-return]


def _conv_operands(named: Named) -> Operands:
    values, scale, zero = _input(named)
    around, size, groups = named["padding"], named["weight_size"], int(named.get("groups", 1))
    if values.dim() != 4 or around[::2] != around[1::2]:
        raise UnavailableError("oneDNN's operator in torch has two dimensions, with the same padding on both sides")
    weight, weight_scale, weight_zero = find_op("xopt.conv_unpack_int8.default")(named["packed"], size, groups)
    geometry = named["stride"], around[::2], named["dilation"], groups
    prepack = find_op("onednn.qconv_prepack.default")
    packed = prepack(weight, weight_scale, scale, zero, *geometry, list(values.shape))
    op = find_op("onednn.qconv_pointwise.default")
    return op, values, scale, zero, packed, weight_scale, weight_zero, named.get("bias"), *geometry, *_after(named)
