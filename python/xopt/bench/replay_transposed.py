"""Who replays a transposed convolution: oneDNN with its weight prepacked, torch, and xopt for those that torch ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xopt.bench.errors import UnavailableError
from xopt.bench.peers import find_op, require_onednn
from xopt.bench.replay_contender import Contender, ours_at_levels
from xopt.bench.replay_operands import Named, dtype_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Transposed:
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: list[int]
    padding: list[int]
    output_padding: list[int]
    dilation: list[int]
    groups: int


def is_transposed(kernel: dict[str, Any]) -> bool:
    ours = kernel["operator"] == "xopt::conv_transpose"
    return ours or (kernel["operator"] == "aten::convolution" and bool(kernel["arguments"].get("transposed")))


def transposed_contenders(kernel: dict[str, Any], make: Callable[[], Named], all_instances: bool) -> list[Contender]:
    if not is_transposed(kernel) or kernel["dtype"] not in ("f32", "bf16", "f16"):
        return []
    ours = kernel["operator"].startswith("xopt::")

    def conv() -> _Transposed:
        return _read(make(), dtype_of(kernel["dtype"]), ours)

    complete = "+" not in kernel["name"].replace("+bias", "")
    alone = "" if complete else ", the convolution alone"
    found = [
        Contender(f"oneDNN{alone}", lambda: _onednn(conv(), kernel["dtype"]), _run_onednn, None, complete),
    ]
    if ours:
        return [*found, Contender(f"torch{alone}", conv, _run_torch, None, complete)]
    for name, level in ours_at_levels("xopt", "conv", kernel["dtype"], all_instances):
        found.append(Contender(name, lambda: _ours(conv()), _run_ours, level))
    return found


def _read(named: Named, dtype: torch.dtype, ours: bool) -> _Transposed:
    groups = int(named.get("groups") or 1)
    values, weight = named["input"].to(dtype), named["packed" if ours else "weight"]
    if ours:
        packed = weight, named["weight_size"], groups, named["stride"], named["dilation"], dtype
        weight = find_op("xopt.conv_transpose_unpack.default")(*packed)
    geometry = (named["stride"], named["padding"], named["output_padding"], named["dilation"])
    bias = named.get("bias")
    return _Transposed(values, weight, None if bias is None else bias.to(dtype), *geometry, groups)


def _onednn(conv: _Transposed, dtype: str) -> tuple[Any, ...]:
    require_onednn(dtype)
    if conv.input.dim() != 4:
        raise UnavailableError("torch's prepacked convolution has two dimensions")
    geometry = conv.padding, conv.output_padding, conv.stride, conv.dilation, conv.groups
    pack = find_op("mkldnn._reorder_convolution_transpose_weight.default")
    return conv.input, pack(conv.weight, *geometry, list(conv.input.shape)), conv.bias, *geometry, "none", [], ""


def _run_onednn(operands: tuple[Any, ...]) -> Tensor:
    return torch.ops.mkldnn._convolution_transpose_pointwise.default(*operands)  # type: ignore[no-any-return]


def _run_torch(conv: _Transposed) -> Tensor:
    geometry = conv.stride, conv.padding, conv.dilation, True, conv.output_padding, conv.groups
    return torch.convolution(conv.input, conv.weight, conv.bias, *geometry)


def _ours(conv: _Transposed) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options: Any = {"stride": conv.stride, "dilation": conv.dilation}
    pack = find_op("xopt.conv_transpose_pack.default")
    packed = pack(conv.weight, conv.groups, **options, dtype=conv.weight.dtype)
    options |= {"padding": conv.padding, "output_padding": conv.output_padding, "groups": conv.groups}
    return (conv.input, packed, list(conv.weight.shape), conv.bias), options


def _run_ours(operands: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
    return torch.ops.xopt.conv_transpose.default(*operands[0], **operands[1])  # type: ignore[no-any-return]
