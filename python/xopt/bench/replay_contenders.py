"""Who replays a recorded call: the same operator, the same at other levels, and whatever else does the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xopt.bench.errors import UnavailableError
from xopt.bench.peers import find_op, require_onednn
from xopt.bench.replay_contender import ONEDNN_ACTIVATIONS, RECORDED, Contender, blockings_of, levels_of, ours_at_levels
from xopt.bench.replay_int8 import int8_contenders
from xopt.bench.replay_operands import Named, dtype_of, operands_of
from xopt.bench.replay_recurrent import recurrent_contenders
from xopt.bench.replay_torch import torch_contenders
from xopt.bench.replay_transposed import is_transposed, transposed_contenders

Tensor = torch.Tensor


def contenders_of(kernel: dict[str, Any], all_instances: bool) -> list[Contender]:
    op = find_op(f"{kernel['operator'].replace('::', '.')}.{kernel['overload'] or 'default'}")

    def make() -> Named:
        return {name: value for name, value in operands_of(kernel).items() if value is not None}

    def call(named: Named) -> Any:
        return op(**named)

    found = [Contender(RECORDED, make, call)]
    if kernel["operator"].startswith("xopt::") and all_instances:
        found += [Contender(f"xopt, {level}", make, call, level) for level in levels_of(kernel)]
        found += [Contender(f"xopt, {name}", make, call, choice=choice) for name, choice in blockings_of(kernel)]
    makers = (
        *(_product_contenders, _conv_contenders, _attention_contenders, transposed_contenders, recurrent_contenders),
        *(int8_contenders, torch_contenders),
    )
    for make_others in makers:
        found += make_others(kernel, make, all_instances)
    return found


# ---- Products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    input: Tensor
    weight: Tensor
    """[columns, terms]."""
    bias: Tensor | None
    activation: str = "none"
    other: Tensor | None = None
    """That is added."""


def _xopt_product(named: Named, dtype: torch.dtype) -> _Product:
    values, columns = named["input"], int(named["out_features"])
    if named.get("first_column"):
        raise UnavailableError("it takes a part of a packed weight")
    unpack = find_op("xopt.linear_unpack.default")
    weight = unpack(named["packed"], columns, values.shape[-1], dtype)
    activation, binary = named.get("activation", "none"), named.get("binary", "none")
    other = named.get("other") if binary == "add" else None
    return _Product(values.to(dtype), weight, named.get("bias"), activation if binary == "none" else "none", other)


def _xopt_gated(named: Named, dtype: torch.dtype) -> _Product:
    values, columns = named["input"], int(named["out_features"])
    pair = find_op("xopt.linear_unpack_gated.default")(named["packed"], columns, values.shape[-1], dtype)
    return _Product(values.to(dtype), torch.cat(pair), None)


def _xopt_weight_only(named: Named, dtype: torch.dtype) -> _Product:
    values, columns = named["input"], int(named["out_features"])
    return _Product(values, torch.randn(columns, values.shape[-1]).to(dtype), None)


def _addmm(named: Named, dtype: torch.dtype) -> _Product:
    return _Product(named["mat1"], named["mat2"].t().contiguous(), named["self"])


def _mm(named: Named, dtype: torch.dtype) -> _Product:
    return _Product(named["self"], named["mat2"].t().contiguous(), None)


def _linear(named: Named, dtype: torch.dtype) -> _Product:
    return _Product(named["input"], named["weight"], named.get("bias"))


_PRODUCTS: dict[str, Callable[[Named, torch.dtype], _Product]] = {
    "xopt::linear": _xopt_product,
    "xopt::linear_norm": _xopt_product,
    "xopt::linear_gated": _xopt_gated,
    "xopt::linear_weight_only": _xopt_weight_only,
    "aten::addmm": _addmm,
    "aten::mm": _mm,
    "aten::linear": _linear,
}


_LESS_THAN_RECORDED = {
    "xopt::linear_norm": "the product alone",
    "xopt::linear_gated": "the products alone",
    "xopt::linear_weight_only": "the weight in full",
}
"""What oneDNN does in torch of these."""


def _product_contenders(kernel: dict[str, Any], make: Callable[[], Named], all_instances: bool) -> list[Contender]:
    read = _PRODUCTS.get(kernel["operator"])
    if read is None or kernel["dtype"] not in ("f32", "bf16", "f16"):
        return []

    def product() -> _Product:
        found = read(make(), dtype_of(kernel["dtype"]))
        bias = found.bias
        if bias is not None and bias.dim() > 1:  # addmm's, repeated for each row
            bias = bias[0].contiguous()
        return _Product(found.input, found.weight, bias, found.activation, found.other)

    less = _LESS_THAN_RECORDED.get(kernel["operator"])
    complete, name = less is None, "oneDNN" if less is None else f"oneDNN, {less}"
    found = [Contender(name, lambda: _onednn_product(product(), kernel["dtype"]), _run_onednn_product, None, complete)]
    if not kernel["operator"].startswith("xopt::"):
        for name, level in ours_at_levels("xopt", "gemm", kernel["dtype"], all_instances):
            found.append(Contender(name, lambda: _our_product(product()), _run_ours, level))
    return found


def _onednn_product(product: _Product, dtype: str) -> tuple[Any, ...]:
    require_onednn(dtype)
    if product.activation not in ONEDNN_ACTIVATIONS:
        raise UnavailableError(f"oneDNN has no {product.activation} after a product in torch")
    rows = product.input.numel() // product.input.shape[-1]
    packed = find_op("mkldnn._reorder_linear_weight.default")(product.weight, rows)
    bias = None if product.bias is None else product.bias.to(product.weight.dtype)
    attribute, kind = ONEDNN_ACTIVATIONS[product.activation]
    return product.input, packed, bias, product.other, attribute, kind


def _run_onednn_product(operands: tuple[Any, ...]) -> Tensor:
    values, packed, bias, other, attribute, kind = operands
    if other is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(values, other, packed, bias, "add")  # type: ignore[no-any-return]
    return torch.ops.mkldnn._linear_pointwise.default(values, packed, bias, attribute, [], kind)  # type: ignore[no-any-return]


def _our_product(product: _Product) -> tuple[Any, ...]:
    packed = find_op("xopt.linear_pack.default")(product.weight, dtype=product.weight.dtype)
    return product.input, packed, product.weight.shape[0], product.bias


def _run_ours(operands: tuple[Any, ...]) -> Tensor:
    return torch.ops.xopt.linear.default(*operands)  # type: ignore[no-any-return]


# ---- Convolutions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Conv:
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    plain: bool
    """Whether nothing is done with the sums but adding the bias."""


def _xopt_conv(named: Named, dtype: torch.dtype) -> _Conv:
    around = named["padding"]
    if around[::2] != around[1::2]:
        raise UnavailableError("torch's convolutions have the same padding on both sides")
    size, groups, values = named["weight_size"], int(named.get("groups", 1)), named["input"]
    weight = find_op("xopt.conv_unpack.default")(named["packed"], size, groups, dtype)
    plain = named.get("activation", "none") == "none" and "other" not in named and "scale" not in named
    bias = named.get("bias")
    return _Conv(values.to(dtype), weight, bias, named["stride"], around[::2], named["dilation"], groups, plain)


def _aten_conv(named: Named, dtype: torch.dtype) -> _Conv:
    geometry = (named["stride"], named["padding"], named["dilation"], int(named["groups"]))
    return _Conv(named["input"], named["weight"], named.get("bias"), *geometry, True)


_CONVS: dict[str, Callable[[Named, torch.dtype], _Conv]] = {"xopt::conv": _xopt_conv, "aten::convolution": _aten_conv}


def _conv_contenders(kernel: dict[str, Any], make: Callable[[], Named], all_instances: bool) -> list[Contender]:
    read = _CONVS.get(kernel["operator"])
    if read is None or kernel["dtype"] not in ("f32", "bf16", "f16") or is_transposed(kernel):
        return []

    def conv() -> _Conv:
        return read(make(), dtype_of(kernel["dtype"]))

    complete = "+" not in kernel["name"].replace("+bias", "")
    name = "oneDNN" if complete else "oneDNN, the convolution alone"
    found = [Contender(name, lambda: _onednn_conv(conv(), kernel["dtype"]), _run_onednn_conv, None, complete)]
    if kernel["operator"].startswith("xopt::"):
        return found
    for name, level in ours_at_levels("xopt", "conv", kernel["dtype"], all_instances):
        found.append(Contender(name, lambda: _our_conv(conv()), _run_our_conv, level))
    return found


def _onednn_conv(conv: _Conv, dtype: str) -> tuple[Any, ...]:
    require_onednn(dtype)
    if conv.input.dim() != 4:
        raise UnavailableError("torch's prepacked convolution has two dimensions")
    geometry = conv.padding, conv.stride, conv.dilation, conv.groups
    weight = conv.weight.contiguous(memory_format=torch.channels_last)
    packed = find_op("mkldnn._reorder_convolution_weight.default")(weight, *geometry, list(conv.input.shape))
    bias = None if conv.bias is None else conv.bias.to(conv.weight.dtype)
    return conv.input, packed, bias, *geometry, "none", [], ""


def _run_onednn_conv(operands: tuple[Any, ...]) -> Tensor:
    return torch.ops.mkldnn._convolution_pointwise.default(*operands)  # type: ignore[no-any-return]


def _our_conv(conv: _Conv) -> tuple[tuple[Any, ...], dict[str, Any]]:
    packed = find_op("xopt.conv_pack.default")(conv.weight, conv.groups, dtype=conv.weight.dtype)
    around = [amount for amount in conv.padding for _ in range(2)]
    geometry = {"stride": conv.stride, "padding": around, "dilation": conv.dilation, "groups": conv.groups}
    return (conv.input, packed, list(conv.weight.shape), conv.bias), geometry


def _run_our_conv(operands: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
    return torch.ops.xopt.conv.default(*operands[0], **operands[1])  # type: ignore[no-any-return]


# ---- Attention -------------------------------------------------------------------------------------------------------


def _attention_contenders(kernel: dict[str, Any], make: Callable[[], Named], all_instances: bool) -> list[Contender]:
    def operands() -> tuple[Any, ...]:
        named = make()
        causal = bool(named.get("causal") or named.get("is_causal"))
        causal &= not (named.get("one_sees_all") and named["query"].shape[2] == 1)
        mask = named.get("mask", named.get("attn_mask"))
        if named.get("window") or named.get("causal_offset"):
            mask, causal = _banded(named, causal, mask), False
        key, value = named["key"], named["value"]
        if named.get("sinks") is not None:
            mask, causal = _with_sinks(named, _banded(named, causal, mask)), False
            key, value = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (key, value))
        return named["query"], key, value, mask, causal, named.get("scale")

    if kernel["operator"] == "xopt::attention":
        return [Contender("torch", operands, _run_torch_attention)]
    if kernel["operator"] != "aten::scaled_dot_product_attention" or kernel["dtype"] not in ("f32", "bf16", "f16"):
        return []
    names = ours_at_levels("xopt", "attention", kernel["dtype"], all_instances)
    return [Contender(name, operands, _run_our_attention, level) for name, level in names]


def _banded(named: Named, causal: bool, mask: Tensor | None) -> Tensor | None:
    """Causality from another row on and windows, as torch takes them: a mask, if they hide anything."""
    queries, keys = named["query"].shape[2], named["key"].shape[2]
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - named.get("causal_offset", 0)
    seen = (distance <= 0) if causal else torch.ones(queries, keys, dtype=torch.bool)
    if named.get("window"):
        seen &= distance > -named["window"]
    if bool(seen.all()):
        return mask
    if mask is None or mask.dtype == torch.bool:
        return seen if mask is None else mask & seen
    return mask.masked_fill(~seen, -torch.inf)


def _with_sinks(named: Named, mask: Tensor | None) -> Tensor:
    """The mask with one more column, of a key and a value that are zeros: what a sink is."""
    batch, heads, queries, _ = named["query"].shape
    dtype, keys = named["query"].dtype, named["key"].shape[2]
    added = torch.zeros((), dtype=dtype) if mask is None else mask
    if added.dtype == torch.bool:
        added = torch.zeros_like(added, dtype=dtype).masked_fill(~added, -torch.inf)
    sinks = named["sinks"].to(dtype).expand(batch, heads, queries, 1)
    return torch.cat([added.to(dtype).expand(batch, heads, queries, keys), sinks], -1)


def _run_torch_attention(operands: tuple[Any, ...]) -> Tensor:
    query, key, value, mask, causal, scale = operands
    attention = torch.nn.functional.scaled_dot_product_attention
    result = attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return result.transpose(1, 2)


def _run_our_attention(operands: tuple[Any, ...]) -> Tensor:
    query, key, value, mask, causal, scale = operands
    result: Tensor = torch.ops.xopt.attention.default(query, key, value, mask, scale=scale, causal=causal)
    return result.transpose(1, 2)
