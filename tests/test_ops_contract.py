"""What every operator owes its caller: its schema, opcheck, errors that name the argument, shapes, strides, compile.

Numbers are checked elsewhere (tests/families.py); here a plain comparison shows that arguments reach the kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.test_chain import random_calls
from xopt import _C
from xopt.modules.packed_parameter import PackedParameter

Tensor = torch.Tensor
Call = tuple[tuple[Any, ...], dict[str, Any]]
ops = torch.ops.xopt

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
N, K = 40, 24

SCHEMAS = {
    "adaptive_pool": "adaptive_pool(Tensor input, str kind, int[] output_size) -> Tensor",
    "conv": "conv(Tensor input, Tensor packed, int[] weight_size, Tensor? bias=None, *, int[] stride, int[] padding, "
    'int[] dilation, int groups=1, Tensor? scale=None, str activation="none", float alpha=0., float beta=0., '
    'str binary="none", Tensor? other=None, bool activation_last=False, ScalarType? out_dtype=None) -> Tensor',
    "group_norm": "group_norm(Tensor input, int groups, Tensor? weight=None, Tensor? bias=None, *, "
    'float eps=1.0000000000000001e-05, str activation="none", ScalarType? out_dtype=None) -> Tensor',
    "pool": "pool(Tensor input, str kind, *, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
    "bool ceil_mode=False, bool count_include_pad=True, int divisor=0) -> Tensor",
    "recurrent": "recurrent(Tensor input, Tensor[] weights, Tensor? hidden=None, Tensor? cell_state=None, "
    "Tensor? batch_sizes=None, *, str cell, int hidden_size, int proj_size=0, int num_layers=1, bool bias=True, "
    "bool bidirectional=False, bool batch_first=False, ScalarType? out_dtype=None) "
    "-> (Tensor out, Tensor last_hidden, Tensor last_cell)",
    "matmul": "matmul(Tensor left, Tensor right, Tensor? other=None, *, float alpha=1., "
    "ScalarType? out_dtype=None) -> Tensor",
    "softmax": "softmax(Tensor input, *, ScalarType? out_dtype=None) -> Tensor",
    "upsample": "upsample(Tensor input, int[] size, str mode, *, bool align_corners=False, float? scale_d=None, "
    "float? scale_h=None, float? scale_w=None) -> Tensor",
    "chain": "chain(Tensor[] tensors, str calls) -> Tensor[]",
    "conv_transpose": "conv_transpose(Tensor input, Tensor packed, int[] weight_size, Tensor? bias=None, *, "
    "int[] stride, int[] padding, int[] output_padding, int[] dilation, int groups=1, Tensor? scale=None, "
    'str activation="none", float alpha=0., float beta=0., str binary="none", Tensor? other=None, '
    "bool activation_last=False, ScalarType? out_dtype=None) -> Tensor",
    "conv_transpose_pack": "conv_transpose_pack(Tensor weight, int groups=1, *, int[] stride, int[] dilation, "
    "ScalarType dtype) -> Tensor",
    "conv_transpose_unpack": "conv_transpose_unpack(Tensor packed, int[] weight_size, int groups, int[] stride, "
    "int[] dilation, ScalarType dtype) -> Tensor",
    "conv_pack": "conv_pack(Tensor weight, int groups=1, *, ScalarType dtype) -> Tensor",
    "conv_unpack": "conv_unpack(Tensor packed, int[] weight_size, int groups, ScalarType dtype) -> Tensor",
    "conv_pack_int8": "conv_pack_int8(Tensor weight, Tensor scale, Tensor? zero_point=None, int groups=1) -> Tensor",
    "conv_unpack_int8": "conv_unpack_int8(Tensor packed, int[] weight_size, int groups) "
    "-> (Tensor weight, Tensor scale, Tensor zero_point)",
    "layer_norm": "layer_norm(Tensor input, Tensor? weight=None, Tensor? bias=None, *, "
    "float eps=1.0000000000000001e-05, Tensor? residual=None, "
    "bool return_sum=False, ScalarType? out_dtype=None) -> (Tensor out, Tensor sum)",
    "rms_norm": "rms_norm(Tensor input, Tensor? weight=None, *, float eps=9.9999999999999995e-07, "
    "float weight_offset=0., Tensor? residual=None, "
    "bool return_sum=False, ScalarType? out_dtype=None) -> (Tensor out, Tensor sum)",
    "rotary": "rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, *, bool interleaved=False) "
    "-> (Tensor query_out, Tensor key_out)",
    "attention": "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, *, float? scale=None, "
    "bool causal=False, int causal_offset=0, int window=0) -> Tensor",
    "linear": 'linear(Tensor input, Tensor packed, int out_features, Tensor? bias=None, *, str activation="none", '
    'float alpha=0., float beta=0., str binary="none", Tensor? other=None, bool activation_last=False, '
    "ScalarType? out_dtype=None, float output_scale=1., int output_zero_point=0, int first_column=0, "
    "Tensor? scale=None) -> Tensor",
    "linear_gated": "linear_gated(Tensor input, Tensor packed, int out_features, Tensor? gate_bias=None, "
    'Tensor? up_bias=None, *, str activation="silu", float alpha=0., float beta=0., ScalarType? out_dtype=None) '
    "-> Tensor",
    "linear_norm": "linear_norm(Tensor input, Tensor packed, int out_features, Tensor? bias=None, "
    'Tensor? residual=None, *, str norm="layer_norm", Tensor? norm_weight=None, Tensor? norm_bias=None, '
    "float eps=1.0000000000000001e-05, ScalarType? out_dtype=None, bool return_sum=False) -> (Tensor out, Tensor sum)",
    "linear_pack": "linear_pack(Tensor weight, *, ScalarType dtype) -> Tensor",
    "linear_pack_gated": "linear_pack_gated(Tensor gate, Tensor up, *, ScalarType dtype) -> Tensor",
    "linear_pack_int8": "linear_pack_int8(Tensor weight, Tensor scale, Tensor? zero_point=None) -> Tensor",
    "linear_pack_weight_only": "linear_pack_weight_only(Tensor weight, Tensor scale, Tensor? zero_point=None, *, "
    "int bits, int group_size, bool gated=False) -> Tensor",
    "linear_weight_only": "linear_weight_only(Tensor input, Tensor packed, int out_features, Tensor? bias=None, "
    'Tensor? up_bias=None, *, bool gated=False, str activation="none", float alpha=0., float beta=0., '
    'str binary="none", Tensor? other=None, bool activation_last=False, ScalarType? out_dtype=None) -> Tensor',
    "linear_unpack": "linear_unpack(Tensor packed, int out_features, int in_features, ScalarType dtype) -> Tensor",
    "linear_unpack_gated": "linear_unpack_gated(Tensor packed, int out_features, int in_features, ScalarType dtype) "
    "-> (Tensor gate, Tensor up)",
    "linear_unpack_int8": "linear_unpack_int8(Tensor packed, int out_features, int in_features) "
    "-> (Tensor weight, Tensor scale, Tensor zero_point)",
    "packed_rows": "packed_rows(Tensor packed, Tensor indices, int out_features, int in_features, ScalarType dtype) "
    "-> Tensor",
    "window_merge": "window_merge(Tensor windows, int[] size, int[] shift) -> Tensor",
    "window_partition": "window_partition(Tensor image, int[] window, int[] shift) -> Tensor",
    "qconv": "qconv(Tensor input, Tensor input_scale, Tensor? input_zero_point, Tensor packed, int[] weight_size, "
    "Tensor? bias=None, *, int[] stride, int[] padding, int[] dilation, int groups=1, "
    'str activation="none", float alpha=0., float beta=0., str binary="none", '
    "Tensor? other=None, bool activation_last=False, ScalarType out_dtype=6, float output_scale=1., "
    "int output_zero_point=0) -> Tensor",
    "qlinear": "qlinear(Tensor input, Tensor input_scale, Tensor? input_zero_point, Tensor packed, int out_features, "
    'Tensor? bias=None, *, str activation="none", float alpha=0., float beta=0., str binary="none", '
    "Tensor? other=None, bool activation_last=False, ScalarType out_dtype=6, float output_scale=1., "
    "int output_zero_point=0) -> Tensor",
}


def registered_ops() -> list[str]:
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("xopt::")}
    return sorted(name.removeprefix("xopt::") for name in names)


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


# ---- Samples: calls of each op, which opcheck and the tests of shapes walk ------------------------------------------


def samples_linear() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(3, K, dtype=dtype), packed(dtype), N), {}
    x, other = random(2, 3, K), random(2, 3, N)
    yield (x, packed(), N, random(N)), {"activation": "gelu_tanh", "binary": "add", "other": other}
    yield (x.transpose(0, 1), packed(), N), {"binary": "mul", "other": random(N), "activation_last": True}
    yield (random(K), packed(), N), {"activation": "clamp", "alpha": -1.0, "beta": 1.0, "out_dtype": torch.bfloat16}
    yield (x, packed(), N), {"out_dtype": torch.uint8, "output_scale": 0.1, "output_zero_point": 128}
    yield (random(0, K), packed(), N), {}
    yield (x, packed(), N, random(N)), {"scale": random(N, dtype=torch.bfloat16), "activation": "relu"}


def samples_linear_gated() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(3, K, dtype=dtype), packed_gated(dtype), N, random(N), random(N)), {}
    yield (random(2, 3, K), packed_gated(), N), {"activation": "gelu_erf", "out_dtype": torch.float16}


def samples_linear_norm() -> Iterator[Call]:
    for norm, return_sum in itertools.product(("layer_norm", "rms_norm"), (False, True)):
        yield (
            (random(2, 3, K), packed(), N, random(N), random(2, 3, N)),
            {"norm": norm, "norm_weight": random(N), "norm_bias": random(N), "return_sum": return_sum},
        )
    yield (random(3, K), packed(torch.bfloat16), N), {"out_dtype": torch.bfloat16, "return_sum": True}


def samples_qlinear() -> Iterator[Call]:
    for dtype in (torch.uint8, torch.int8):
        x = random(2, 3, K, dtype=dtype)
        zero_point = torch.tensor([3], dtype=torch.int32)
        yield (x, torch.tensor([0.1]), zero_point, packed_int8(), N, random(N)), {"activation": "relu"}
        yield (x, random(6).abs(), zero_point.expand(6), packed_int8(), N), {"binary": "add", "other": random(2, 3, N)}
        yield (x, torch.tensor(0.1), None, packed_int8(), N), {"out_dtype": torch.int8, "output_scale": 9.0}


def samples_attention() -> Iterator[Call]:
    for dtype in FLOATS:
        query, key = random(2, 4, 12, 8, dtype=dtype), random(2, 2, 9, 8, dtype=dtype)
        yield (query, key, key), {}
        yield (query[:, :, :1], key, key[..., :5]), {"scale": 0.5, "causal": True, "causal_offset": 4, "window": 3}
        yield (query.transpose(1, 2), random(2, 12, 7, 8, dtype=dtype), random(2, 12, 7, 8, dtype=dtype)), {}
    yield (query, key, key, random(2, 1, 1, 9) < 0), {}
    yield (query, key, key, random(12, 9).to(query.dtype)), {"causal": True}
    yield (query[:, :, :0], key, key), {}


def samples_matmul() -> Iterator[Call]:
    for dtype in FLOATS:
        left, right = random(2, 3, 5, K, dtype=dtype), random(3, K, N, dtype=dtype)
        yield (left, right), {"out_dtype": torch.float32}
        yield (left, random(2, 1, 7, K, dtype=dtype).mT, random(7, dtype=dtype)), {"alpha": 0.5}
        yield (right.mT, left.mT, random(3, 1, 1)), {}
    yield (random(0, 3, K), random(K, N)), {}


def samples_layer_norm() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(3, 5, K, dtype=dtype), random(K), random(K, dtype=dtype)), {}
        yield (random(3, K, dtype=dtype),), {"residual": random(3, K), "return_sum": True, "out_dtype": torch.float32}
    yield (random(0, K),), {}


def samples_softmax() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(3, 5, K, dtype=dtype),), {}
        yield (random(K, 3, dtype=dtype).t(),), {"out_dtype": torch.float32}
    yield (random(0, K),), {}


def samples_rms_norm() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(3, 5, K, dtype=dtype), random(K)), {"weight_offset": 1.0}
        yield (random(3, K, dtype=dtype),), {"residual": random(3, K), "return_sum": True, "out_dtype": torch.float32}


def samples_rotary() -> Iterator[Call]:
    for dtype in FLOATS:
        query, key = random(2, 4, 5, 8, dtype=dtype), random(2, 5, 2, 8, dtype=dtype).transpose(1, 2)
        yield (query, key, random(1, 5, 8), random(2, 5, 8, dtype=dtype)), {}
        yield (query, key, random(2, 5, 6, dtype=dtype), random(1, 5, 6)), {"interleaved": True}


CONV_WEIGHTS = (((10, 3, 3, 3), 1), ((8, 1, 3), 8), ((12, 2, 1, 2, 3), 6), ((80, 4, 1, 1), 2))


def samples_conv() -> Iterator[Call]:
    for dtype, (size, groups) in itertools.product(FLOATS, CONV_WEIGHTS):
        dims = len(size) - 2
        x = random(2, size[1] * groups, *(5, 6, 7)[:dims], dtype=dtype)
        weight = ops.conv_pack(random(*size), groups, dtype=dtype)
        geometry = {"stride": [2] * dims, "padding": [1, 0] * dims, "dilation": [1] * dims, "groups": groups}
        yield (x, weight, list(size), random(size[0])), geometry
        out = ops.conv(x, weight, list(size), **geometry)
        yield (
            (x.movedim(1, -1).contiguous().movedim(-1, 1), weight, list(size)),
            geometry | {"scale": random(size[0]), "activation": "relu", "binary": "add", "other": out},
        )
        yield (x[:0], weight, list(size)), geometry | {"out_dtype": torch.float32}


def samples_pool() -> Iterator[Call]:
    for dtype, dims, ceil_mode in itertools.product(FLOATS, (1, 2, 3), (False, True)):
        geometry = {"kernel_size": [3] * dims, "stride": [2] * dims, "padding": [1] * dims, "dilation": [1] * dims}
        x = random(2, 5, *(6, 7, 5)[:dims], dtype=dtype)
        yield (x, "max"), geometry | {"ceil_mode": ceil_mode}
        yield (x.movedim(1, -1).contiguous().movedim(-1, 1), "average"), geometry | {"count_include_pad": False}
        yield (x[:0], "average"), geometry | {"divisor": 3}


def samples_adaptive_pool() -> Iterator[Call]:
    for dtype, dims in itertools.product(FLOATS, (1, 2, 3)):
        x = random(2, 5, *(6, 7, 5)[:dims], dtype=dtype)
        yield (x, "max", [1] * dims), {}
        yield (x.movedim(1, -1).contiguous().movedim(-1, 1), "average", [3, 8, 2][:dims]), {}
        yield (x[:0], "average", [2] * dims), {}


def samples_group_norm() -> Iterator[Call]:
    for dtype, dims in itertools.product(FLOATS, (1, 2, 3)):
        x = random(2, 6, *(6, 7, 5)[:dims], dtype=dtype)
        yield (x, 3), {}
        last = x.movedim(1, -1).contiguous().movedim(-1, 1)
        yield (last, 2, random(6), random(6, dtype=dtype)), {"activation": "silu", "out_dtype": torch.float32}
    yield (x[:0], 1), {}


def recurrent_weights(gates: int, dtype: torch.dtype, n: int = N, k: int = K) -> list[Tensor]:
    """Of one direction of a layer, with biases."""
    weights = [PackedParameter.pack(random(gates * n, size), dtype, gates=gates).packed for size in (k, n)]
    return [*weights, random(gates * n), random(gates * n)]


def samples_recurrent() -> Iterator[Call]:
    for dtype, (cell, gates) in itertools.product(FLOATS, (("lstm", 4), ("gru", 3), ("rnn_tanh", 1))):
        options = {"cell": cell, "hidden_size": N}
        weights = recurrent_weights(gates, dtype)
        yield (random(5, 3, K, dtype=dtype), weights), options
        states = (random(1, 3, N), random(1, 3, N) if cell == "lstm" else None)
        yield (random(3, 5, K, dtype=dtype), weights, *states), options | {"batch_first": True}
        both = {"bidirectional": True, "out_dtype": torch.float32}
        state = random(2, 3, N, dtype=dtype)
        yield (random(6, K), weights * 2, state, None, torch.tensor([3, 2, 1])), options | both
        yield (random(4, 0, K), weights), options


def samples_upsample() -> Iterator[Call]:
    for dtype, dims in itertools.product(FLOATS, (1, 2, 3)):
        x = random(2, 6, *(6, 7, 5)[:dims], dtype=dtype)
        yield (x, (9, 3, 10)[:dims], "nearest"), {}
        yield (x.movedim(1, -1).contiguous().movedim(-1, 1), (9, 3, 10)[:dims], "linear"), {"align_corners": True}
    yield (x[:0], (4, 5, 6), "linear"), {"scale_d": 2.0, "scale_w": 1.2}


def samples_window_partition() -> Iterator[Call]:
    for dtype in (*FLOATS, torch.int8):
        x = random(2, 7, 5, 6, dtype=dtype)
        yield (x, (3, 2), (-1, 1)), {}
        yield (x.movedim(-1, 1), (2, 4), (0, 0)), {}
    yield (x[:0], (4, 5), (1, 1)), {}


def samples_window_merge() -> Iterator[Call]:
    for dtype in (*FLOATS, torch.int8):
        x = random(2, 3, 3, 3, 2, 6, dtype=dtype)
        yield (x, (7, 5), (-1, 1)), {}
        yield (x.transpose(1, 2), (9, 6), (0, 0)), {}
    yield (x[:0], (4, 5), (1, 1)), {}


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


def samples_chain() -> Iterator[Call]:
    for seed in range(6):
        calls = random_calls(seed)
        yield calls.arguments(range(len(calls.lines))), {}


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


def samples_conv_pack_int8() -> Iterator[Call]:
    for size, groups in CONV_WEIGHTS:
        weight, zero_points = random(*size, dtype=torch.int8), torch.arange(size[0], dtype=torch.int32)
        yield (weight, random(1)), {"groups": groups}
        yield (weight, random(size[0]), zero_points, groups), {}


def samples_conv_unpack_int8() -> Iterator[Call]:
    for size, groups in CONV_WEIGHTS:
        weight = ops.conv_pack_int8(random(*size, dtype=torch.int8), random(size[0]), None, groups)
        yield (weight, list(size), groups), {}


def samples_conv_pack() -> Iterator[Call]:
    for dtype, (size, groups) in itertools.product(FLOATS, CONV_WEIGHTS):
        yield (random(*size, dtype=dtype), groups), {"dtype": torch.bfloat16}


def samples_conv_unpack() -> Iterator[Call]:
    for dtype, (size, groups) in itertools.product(FLOATS, CONV_WEIGHTS):
        yield (ops.conv_pack(random(*size), groups, dtype=dtype), list(size), groups, dtype), {}


def samples_linear_pack() -> Iterator[Call]:
    for source, dtype in itertools.product(FLOATS, FLOATS):
        yield (random(N, K, dtype=source),), {"dtype": dtype}
    yield (random(K, N).t(),), {"dtype": torch.bfloat16}


def samples_linear_pack_gated() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (random(N, K), random(N, K)), {"dtype": dtype}


def samples_linear_pack_int8() -> Iterator[Call]:
    yield (random(N, K, dtype=torch.int8), random(N)), {}
    yield (random(N, K, dtype=torch.int8), random(1), torch.tensor([3], dtype=torch.int32)), {}


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


def samples_linear_unpack() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (packed(dtype), N, K, dtype), {}


def samples_linear_unpack_gated() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (packed_gated(dtype), N, K, dtype), {}


def samples_linear_unpack_int8() -> Iterator[Call]:
    yield (packed_int8(), N, K), {}


def samples_packed_rows() -> Iterator[Call]:
    for dtype in FLOATS:
        yield (packed(dtype), torch.tensor([[3, N - 1, 0], [3, 31, 32]]), N, K, dtype), {}
    yield (packed(), torch.tensor(7, dtype=torch.int32), N, K, torch.float32), {}
    yield (packed(), torch.zeros(0, 2, dtype=torch.int64), N, K, torch.float32), {}


def samples_of(op: str) -> list[Call]:
    generator = globals().get(f"samples_{op}")
    assert generator is not None, f"xopt::{op} has no samples: add samples_{op}() to {__name__}"
    return list(generator())


@pytest.mark.parametrize("op", registered_ops())
def test_schema_is_pinned(op: str) -> None:
    assert str(getattr(ops, op).default._schema) == f"xopt::{SCHEMAS[op]}"


def test_no_schema_is_missing() -> None:
    assert registered_ops() == sorted(SCHEMAS)


@pytest.mark.parametrize("op", registered_ops())
def test_opcheck(op: str) -> None:
    """All of it on each kind of call; on those that differ in their tensors' dtypes alone, all but the tracing, which
    takes longest and sees of dtypes no more than the check of the fake does."""
    traced = set()
    for args, kwargs in samples_of(op):
        kind = str(tree_map_only(Tensor, lambda x: (x.dim(), x.is_contiguous(), x.numel() == 0), (args, kwargs)))
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        checks += ["test_aot_dispatch_dynamic"] if kind not in traced else []
        torch.library.opcheck(getattr(ops, op).default, args, kwargs, test_utils=checks)
        traced.add(kind)


@pytest.mark.parametrize("op", registered_ops())
def test_arguments_are_not_changed_and_results_repeat(op: str) -> None:
    for args, kwargs in samples_of(op):
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        before = [tensor.clone() for tensor in tensors]
        results = [getattr(ops, op)(*args, **kwargs) for _ in range(2)]
        first, second = (result if isinstance(result, (tuple, list)) else [result] for result in results)
        assert all(torch.equal(a, b) and is_dense(a) for a, b in zip(first, second, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def is_dense(x: Tensor) -> bool:
    """Contiguous, or with dimension 1 last in memory, as convolutions answer."""
    return x.is_contiguous() or x.movedim(1, -1).is_contiguous()


# ---- Bad arguments -------------------------------------------------------------------------------------------------

X = random(3, K)
BAD_LINEAR: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.linear(X.double(), packed(), N), "input: expected dtype float32 or bfloat16 or float16, got float64"),
    (lambda: ops.linear(X.to(torch.int8), packed(), N), "input: expected dtype .*, got int8"),
    (lambda: ops.linear(random(3, K + 1), packed(), N), f"input: expected a last dimension of {K}, .* got {K + 1}"),
    (lambda: ops.linear(torch.tensor(1.0), packed(), N), "input: expected 1 to 64 dimensions, got 0"),
    (lambda: ops.linear(X, packed(), N + 1), f"out_features: expected {N}, .* got {N + 1}"),
    (lambda: ops.linear(X, packed(), -1), "out_features: expected 40, .* got -1"),
    (lambda: ops.linear(X, packed_gated(), N), "packed: expected a single weight, got a gated pair"),
    (lambda: ops.linear(X, packed_int8(), N), "packed: expected a packed weight of float32, .* got one of int8"),
    (lambda: ops.linear(X, random(N, K), N), "packed: expected dtype uint8, got float32"),
    (lambda: ops.linear(X, packed(), N, random(N + 1)), r"bias: expected shape \[40\], got \[41\]"),
    (lambda: ops.linear(X, packed(), N, random(1, N)), r"bias: expected shape \[40\], got \[1, 40\]"),
    (lambda: ops.linear(X, packed(), N, random(N).double()), "bias: expected dtype .*, got float64"),
    (lambda: ops.linear(X, packed(), N, scale=random(N + 1)), r"scale: expected shape \[40\], got \[41\]"),
    (lambda: ops.linear(X, packed(), N, activation="swish"), "activation: expected one of none, relu, .*, got 'swish'"),
    (lambda: ops.linear(X, packed(), N, activation=""), "activation: expected one of .*, got ''"),
    (lambda: ops.linear(X, packed(), N, binary="sub"), "binary: expected one of none, add, mul, got 'sub'"),
    (lambda: ops.linear(X, packed(), N, binary="add"), "other: expected a tensor for binary='add', got None"),
    (lambda: ops.linear(X, packed(), N, other=X), "other: expected None for binary='none', got a tensor"),
    (
        lambda: ops.linear(X, packed(), N, binary="add", other=random(2, N)),
        r"other: expected the output's shape \[3, 40\] or a row \[40\], got \[2, 40\]",
    ),
    (lambda: ops.linear(X, packed(), N, binary="add", other=random(3, N).long()), "other: expected dtype .* int64"),
    (lambda: ops.linear(X, packed(), N, out_dtype=torch.float64), "out_dtype: expected one of .*, got float64"),
    (lambda: ops.linear(X, packed(), N, output_scale=2.0), "output_scale: expected 1, .* got 2"),
    (lambda: ops.linear(X, packed(), N, output_zero_point=2), "output_zero_point: expected 0, .* got 2"),
    (lambda: ops.linear(X, packed(), N, out_dtype=torch.int8, output_scale=0.0), "output_scale: expected a positive"),
    (lambda: ops.linear(X, packed(), N, out_dtype=torch.int8, output_scale=1e-300), "output_scale: expected a posit"),
    (lambda: ops.linear(X, packed(), N, out_dtype=torch.int8, output_scale=float("nan")), "output_scale: expected"),
    (
        lambda: ops.linear(X, packed(), N, out_dtype=torch.uint8, output_zero_point=256),
        "output_zero_point: expected 0 to 255, got 256",
    ),
    (
        lambda: ops.linear(torch.zeros(1, 1).expand(2**31, 1).unsqueeze(1).expand(-1, 2**31, 1), packed(k=1), N),
        "input: the output's shape .* is more than fits in memory",
    ),
]
BAD_GATED: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.linear_gated(X, packed(), N), "packed: expected a gated pair of weights .*, got a single one"),
    (lambda: ops.linear_gated(X, packed_gated(), N, random(3)), r"gate_bias: expected shape \[40\], got \[3\]"),
    (lambda: ops.linear_gated(X, packed_gated(), N, None, random(3)), r"up_bias: expected shape \[40\], got \[3\]"),
    (lambda: ops.linear_gated(X, packed_gated(), N, activation="glu"), "activation: expected one of .* got 'glu'"),
    (lambda: ops.linear_gated(X, packed_gated(), N, out_dtype=torch.int8), "out_dtype: expected one of .* got int8"),
]
BAD_NORM: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.linear_norm(X, packed(), N, norm="batch"), "norm: expected one of layer_norm, rms_norm, got 'batch'"),
    (lambda: ops.linear_norm(X, packed(), N, norm_weight=random(3)), r"norm_weight: expected shape \[40\], got \[3\]"),
    (lambda: ops.linear_norm(X, packed(), N, norm_bias=random(3)), r"norm_bias: expected shape \[40\], got \[3\]"),
    (
        lambda: ops.linear_norm(X, packed(), N, None, random(N)),
        r"residual: expected the output's shape \[3, 40\], got \[40\]",
    ),
    (lambda: ops.linear_norm(X, packed(), N, eps=-1.0), "eps: expected a number of at least 0, got -1"),
    (lambda: ops.linear_norm(X, packed(), N, out_dtype=torch.int8), "out_dtype: expected one of .* got int8"),
]
Q, ONE = random(3, K, dtype=torch.int8), torch.ones(1)
BAD_QLINEAR: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.qlinear(X, ONE, None, packed_int8(), N), "input: expected dtype uint8 or int8, got float32"),
    (lambda: ops.qlinear(Q, ONE, None, packed(), N), "packed: expected a packed weight of int8, got one of float32"),
    (lambda: ops.qlinear(Q, ONE.double(), None, packed_int8(), N), "input_scale: expected dtype float32, got float64"),
    (lambda: ops.qlinear(Q, ONE.expand(2), None, packed_int8(), N), r"input_scale: expected shape \[1\] or \[3\], .*2"),
    (lambda: ops.qlinear(Q, ONE.expand(3, 1), None, packed_int8(), N), r"input_scale: expected shape .* got \[3, 1\]"),
    (lambda: ops.qlinear(Q, ONE, ONE, packed_int8(), N), "input_zero_point: expected dtype int32, got float32"),
    (lambda: ops.qlinear(Q, ONE, ONE.int().expand(5), packed_int8(), N), "input_zero_point: expected shape .*5"),
    (lambda: ops.qlinear(Q, ONE, None, packed_int8(), N, out_dtype=torch.int32), "out_dtype: expected one of .* int32"),
]
HEADS = random(2, 3, 5, 8)
BAD_ATTENTION: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.attention(X, HEADS, HEADS), r"query: expected four dimensions .* got shape \[3, 24\]"),
    (lambda: ops.attention(HEADS, X, HEADS), r"key: expected four dimensions .* got shape \[3, 24\]"),
    (lambda: ops.attention(HEADS, HEADS, X), r"value: expected four dimensions .* got shape \[3, 24\]"),
    (lambda: ops.attention(HEADS.double(), HEADS, HEADS), "query: expected dtype .*, got float64"),
    (lambda: ops.attention(HEADS, HEADS.half(), HEADS), "key: expected dtype float32, got float16"),
    (lambda: ops.attention(HEADS, HEADS, HEADS.half()), "value: expected dtype float32, got float16"),
    (lambda: ops.attention(HEADS, HEADS[:1], HEADS), r"key: expected shape \[2, 3, 5, 8\], got \[1, 3, 5, 8\]"),
    (lambda: ops.attention(HEADS, HEADS[..., 1:], HEADS), r"key: expected shape \[2, 3, 5, 8\], got \[2, 3, 5, 7\]"),
    (lambda: ops.attention(HEADS, HEADS, HEADS[:, :, 1:]), r"value: expected shape .* got \[2, 3, 4, 8\]"),
    (lambda: ops.attention(HEADS, HEADS[:, :2], HEADS[:, :2]), "query: expected .* multiple of the 2 heads .* got 3"),
    (lambda: ops.attention(HEADS, HEADS[:, :0], HEADS[:, :0]), "query: expected .* multiple of the 0 heads .* got 3"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, random(4)), r"mask: .* broadcasts to \[2, 3, 5, 5\], got \[4\]"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, random(1, 2, 3, 5, 5)), "mask: expected a shape that broadcasts"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, torch.zeros(5, dtype=torch.int32)), "mask: expected .* got int32"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, scale=float("nan")), "scale: expected a finite number, got nan"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, window=-1), "window: expected a number of at least 0, got -1"),
]
ANGLES = random(2, 5, 8)
BAD_ROWS: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.layer_norm(X.double()), "input: expected dtype .*, got float64"),
    (lambda: ops.layer_norm(random(3)[0]), "input: expected 1 to .* dimensions, got 0"),
    (lambda: ops.layer_norm(X, random(5)), rf"weight: expected shape \[{K}\], got \[5\]"),
    (lambda: ops.layer_norm(X, None, random(5)), rf"bias: expected shape \[{K}\], got \[5\]"),
    (lambda: ops.layer_norm(X, residual=X[:1]), rf"residual: expected the input's shape \[3, {K}\], got \[1, {K}\]"),
    (lambda: ops.layer_norm(X, residual=X.double()), "residual: expected dtype .*, got float64"),
    (lambda: ops.rms_norm(X, eps=-1.0), "eps: expected a number of at least 0, got -1"),
    (lambda: ops.rms_norm(X, out_dtype=torch.int8), "out_dtype: expected one of .*, got int8"),
    (lambda: ops.rotary(X, HEADS, ANGLES, ANGLES), r"query: expected \[batch, .*\], got shape \[3, 24\]"),
    (lambda: ops.rotary(HEADS, HEADS.half(), ANGLES, ANGLES), "key: expected dtype float32, got float16"),
    (lambda: ops.rotary(HEADS, HEADS[:, :, :4], ANGLES, ANGLES), r"key: expected shape \[2, 3, 5, 8\], got"),
    (lambda: ops.rotary(HEADS, HEADS, ANGLES[..., :4], ANGLES), r"sin: expected shape \[2, 5, 4\], got \[2, 5, 8\]"),
    (lambda: ops.rotary(HEADS, HEADS, ANGLES[:, :3], ANGLES), r"cos: expected shape \[2, 5, 8\], got \[2, 3, 8\]"),
    (lambda: ops.rotary(HEADS, HEADS, ANGLES[..., :5], ANGLES), r"cos: expected an even number .* depth 8, got shape"),
    (lambda: ops.rotary(HEADS[..., :6], HEADS, ANGLES, ANGLES), r"key: expected shape"),
    (lambda: ops.rotary(HEADS[..., :6], HEADS[..., :6], ANGLES, ANGLES), r"cos: expected an even number .* depth 6"),
    (lambda: ops.rotary(HEADS, HEADS, HEADS, ANGLES), r"cos: expected \[batch, .*\], got shape"),
    (lambda: ops.rotary(HEADS, HEADS, ANGLES, HEADS), r"sin: expected \[batch, .*\], got shape"),
    (lambda: ops.rotary(HEADS[..., :7], HEADS, ANGLES, ANGLES), r"query: expected an even depth, got shape"),
]
INDICES = torch.tensor([1, 2])
BAD_PACKED_ROWS: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.packed_rows(X, INDICES, N, K, torch.float32), "packed: expected dtype uint8, got float32"),
    (lambda: ops.packed_rows(packed_gated(), INDICES, N, K, torch.float32), "packed: .* got a gated pair"),
    (lambda: ops.packed_rows(packed_int8(), INDICES, N, K, torch.float32), "dtype: expected int8, .* got float32"),
    (lambda: ops.packed_rows(packed(), INDICES, N, K, torch.float64), "dtype: expected one of .* got float64"),
    (lambda: ops.packed_rows(packed(), INDICES, N + 1, K, torch.float32), f"out_features: expected {N}, got {N + 1}"),
    (lambda: ops.packed_rows(packed(), INDICES, N, K + 1, torch.float32), f"in_features: expected {K}, got {K + 1}"),
    (lambda: ops.packed_rows(packed(), X, N, K, torch.float32), "indices: expected dtype int64 or int32, got float32"),
    (lambda: ops.packed_rows(packed(), INDICES - 2, N, K, torch.float32), rf"indices: .* in \[0, {N}\), got -1"),
    (lambda: ops.packed_rows(packed(), INDICES + N, N, K, torch.float32), rf"indices: .* got {N + 1}"),
]
PAIR_OF_PANELS = packed(n=2 * N)
BAD_COLUMNS: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.linear(X, PAIR_OF_PANELS, 32, first_column=5), "first_column: expected a multiple of 32 .* got 5"),
    (lambda: ops.linear(X, PAIR_OF_PANELS, 32, first_column=96), "first_column: expected a multiple of 32 .* got 96"),
    (lambda: ops.linear(X, PAIR_OF_PANELS, 32, first_column=64), "out_features: expected 16, .* got 32"),
    (lambda: ops.linear(X, PAIR_OF_PANELS, 20, first_column=32), "out_features: expected 48, .* got 20"),
]
BAD_PACK: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.linear_pack(random(3), dtype=torch.float32), r"weight: expected two dimensions .* got shape \[3\]"),
    (lambda: ops.linear_pack(X.double(), dtype=torch.float32), "weight: expected dtype .* got float64"),
    (lambda: ops.linear_pack(X, dtype=torch.int8), "dtype: expected one of float32, bfloat16, float16, got int8"),
    (
        lambda: ops.linear_pack(torch.zeros(1, 1).expand(2**31, 2**31), dtype=torch.float32),
        r"weight: packed, its shape \[2147483648, 2147483648\] is more than fits in memory",
    ),
    (lambda: ops.linear_pack_gated(X, X.t(), dtype=torch.float32), r"up: expected shape \[3, 24\], got \[24, 3\]"),
    (lambda: ops.linear_pack_gated(X, X.long(), dtype=torch.float32), "up: expected dtype .* got int64"),
    (lambda: ops.linear_pack_int8(X, ONE), "weight: expected dtype int8, got float32"),
    (lambda: ops.linear_pack_int8(Q, ONE.expand(2)), r"scale: expected shape \[3\], got \[2\]"),
    (lambda: ops.linear_pack_int8(Q, ONE, ONE), "zero_point: expected dtype int32, got float32"),
]
STEPS = random(5, 3, K)
CELL = {"cell": "lstm", "hidden_size": N}
WEIGHTS = recurrent_weights(4, torch.float32)
SIZES = torch.tensor([3, 1])
BAD_RECURRENT: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.recurrent(STEPS.double(), WEIGHTS, **CELL), "input: expected dtype .*, got float64"),
    (lambda: ops.recurrent(X, WEIGHTS, **CELL), r"input: expected three dimensions, got shape \[3, 24\]"),
    (lambda: ops.recurrent(STEPS[:0], WEIGHTS, **CELL), "input: expected at least one time step, got 0"),
    (
        lambda: ops.recurrent(STEPS[..., 1:], WEIGHTS, **CELL),
        f"input: expected a last dimension of {K}, .* got {K - 1}",
    ),
    (lambda: ops.recurrent(STEPS, WEIGHTS[:3], **CELL), "weights: expected 4 tensors, got 3"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, bidirectional=True, **CELL), "weights: expected 8 tensors, got 4"),
    (lambda: ops.recurrent(STEPS, WEIGHTS[::-1], **CELL), "packed: expected dtype uint8, got float32"),
    (lambda: ops.recurrent(STEPS, [*WEIGHTS[:3], random(N)], **CELL), r"weights: expected shape \[160\], got \[40\]"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, random(1, 4, N), **CELL), r"hidden: expected shape \[1, 3, 40\], got"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, None, random(3, N), **CELL), r"cell_state: expected shape .* got \[3, 40\]"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, cell="lstms", hidden_size=N), "cell: expected one of lstm, gru, .*'lstms'"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, cell="gru", hidden_size=N), "out_features: expected 256, .* got 192"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, cell="lstm", hidden_size=0), "hidden_size: expected at least 1, got 0"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, num_layers=0, **CELL), "num_layers: expected at least 1, got 0"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, proj_size=-1, **CELL), "proj_size: expected 0, or a positive number .* -1"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, out_dtype=torch.int8, **CELL), "out_dtype: expected one of .* got int8"),
    (
        lambda: ops.recurrent(STEPS, WEIGHTS, None, random(1, 3, N), cell="gru", hidden_size=N),
        "cell_state: expected None for a cell other than lstm, got a tensor",
    ),
    (lambda: ops.recurrent(X, WEIGHTS, None, None, SIZES, **CELL), "hidden: expected a tensor with batch_sizes, got"),
    (
        lambda: ops.recurrent(X, WEIGHTS, random(1, 3, N), None, SIZES, **CELL),
        "batch_sizes: expected a sum of 3, the input's rows, got 4",
    ),
    (lambda: ops.recurrent(X, WEIGHTS, random(1, 3, N), None, SIZES - 1, **CELL), "batch_sizes: .* got 0 at step 1"),
    (lambda: ops.recurrent(X, WEIGHTS, random(1, 3, N), None, SIZES.int(), **CELL), "batch_sizes: .* got int32"),
    (
        lambda: ops.recurrent(X, WEIGHTS, random(1, 3, N), None, torch.tensor([1, 2]), **CELL),
        "batch_sizes: expected positive sizes that never grow .* got 2 at step 1",
    ),
]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("call", "message"),
    [
        *BAD_LINEAR,
        *BAD_GATED,
        *BAD_NORM,
        *BAD_QLINEAR,
        *BAD_ATTENTION,
        *BAD_ROWS,
        *BAD_COLUMNS,
        *BAD_PACKED_ROWS,
        *BAD_PACK,
        *BAD_RECURRENT,
    ],
)
def test_bad_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"xopt::[a-z_0-9]+: {message}"):
        call()
    weight = random(N, K)
    assert torch.allclose(ops.linear(X, packed(), N), F.linear(X, weight), atol=1e-4), "the next call is wrong"


@pytest.mark.parametrize("argument", ["packed", "bias", "other"])
def test_argument_on_another_device(argument: str) -> None:
    arguments = {"packed": packed(), "bias": random(N), "other": random(3, N)}
    arguments[argument] = arguments[argument].to("meta")
    with pytest.raises(RuntimeError, match=f"xopt::linear: {argument}: expected a tensor on"):
        ops.linear(X, out_features=N, binary="add", **arguments)


@pytest.mark.parametrize("op", registered_ops())
def test_what_is_registered_for_intel_gpus_wants_tensors_there(op: str) -> None:
    """By what the dispatcher would call for them, since torch cannot make one without such a device."""
    args, kwargs = samples_of(op)[0]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XPU)
    named = "conv" if op == "chain" else op  # what the samples of chains call
    with pytest.raises(RuntimeError, match=f"^xopt::{named}: [a-z_]+: expected (a tensor|tensors) on .*xpu") as caught:
        getattr(ops, op).default.redispatch(keys, *args, **kwargs)
    assert "\n" not in str(caught.value)


def test_huge_weight_is_an_error_of_memory() -> None:
    with pytest.raises(MemoryError):
        ops.linear_pack(torch.zeros(1, 1).expand(2**24, 2**24), dtype=torch.float32)
    assert ops.linear_pack(X, dtype=torch.float32).dtype == torch.uint8


def test_errors_leak_no_tensor() -> None:
    weight = packed(n=3000, k=1000)
    held = _C.weight_bytes()
    for _ in range(20):
        with pytest.raises(RuntimeError, match="out_features"):
            ops.linear(random(3, 1000), weight, 5)
    del weight
    assert _C.weight_bytes() < held


# ---- Shapes and strides --------------------------------------------------------------------------------------------


def strided_inputs() -> dict[str, Tensor]:
    base = random(4, 6, 5, 3 * K)
    return {
        "vector": random(K),
        "one row": random(1, K),
        "contiguous": random(2, 3, K),
        "odd address": random(6 * K + 1)[1:].view(6, K),
        "row slice": base[0, 0, :, :K],
        "batch of slices": base[:, 1:3, 0, K : 2 * K],
        "head slice": base[1:3, :, 2, :K],
        "three strides": base[::2, ::3, ::2, :K],
        "transposed batch": random(5, 3, K).transpose(0, 1),
        "expanded batch": random(1, 3, K).expand(4, 3, K),
        "expanded rows": random(2, 1, K).expand(2, 5, K),
        "all expanded": random(1, 1, K).expand(3, 4, K),
        "k strided": random(3, 2 * K)[:, ::2],
        "k transposed": random(K, 7).t(),
        "k expanded": random(5, 1).expand(5, K),
        "many dimensions": random(2, 1, 3, 1, 2, K),
        "sizes of one with odd strides": random(3, K).as_strided((1, 3, 1, K), (7, K, 11, 1)),
    }


@pytest.mark.sanitize
@pytest.mark.parametrize("form", strided_inputs())
def test_strided_input_is_as_a_contiguous_one(form: str) -> None:
    x = strided_inputs()[form]
    for dtype in FLOATS:
        weight = packed(dtype)
        out = ops.linear(x, weight, N)
        assert out.shape == (*x.shape[:-1], N)
        assert out.is_contiguous()
        assert torch.equal(out, ops.linear(x.contiguous(), weight, N))
    assert torch.allclose(ops.linear(x, packed(), N), F.linear(x, random(N, K)), atol=1e-4)


IN_PLACE = ("vector", "contiguous", "odd address", "row slice", "batch of slices", "head slice", "expanded batch")


@pytest.mark.parametrize("form", IN_PLACE)
def test_rows_of_contiguous_k_are_read_in_place(form: str) -> None:
    x, weight = strided_inputs()[form], packed()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.linear(x, weight, N)
    assert "aten::copy_" not in {event.name for event in profile.events()}


@pytest.mark.sanitize
@pytest.mark.parametrize("op", ["linear", "linear_norm"])
def test_strided_second_tensor(op: str) -> None:
    x = random(2, 3, K)
    wide = random(2, 3, 2 * N)
    forms = [
        wide[..., :N],
        wide[..., ::2],
        random(3, 2, N).transpose(0, 1),
        random(2, 2, 3, N)[:, 0],
        random(1, 1, N).expand(2, 3, N),
        random(2, 1, N).expand(2, 3, N),
        random(2, N, 3).transpose(1, 2).bfloat16(),
    ]
    for other in forms:
        if op == "linear":
            out, expected = (
                ops.linear(x, packed(), N, binary="add", other=tensor) for tensor in (other, other.contiguous())
            )
        else:
            out, expected = (ops.linear_norm(x, packed(), N, None, tensor)[0] for tensor in (other, other.contiguous()))
        assert torch.equal(out, expected)


def test_columns_of_a_packed_weight() -> None:
    for dtype in FLOATS:
        together = packed(dtype, 80)
        expected = ops.linear(X, together, 80)
        for first, count in ((0, 32), (32, 32), (32, 48), (64, 16), (0, 80)):
            part = ops.linear(X, together, count, first_column=first)
            assert torch.equal(part, expected[:, first : first + count])


def test_strided_vectors() -> None:
    spread = random(N, 2)[:, 1]
    for dtype in FLOATS:
        bias = spread.to(dtype)
        strided = torch.stack([bias, bias + 1], 1)[:, 0]
        assert torch.equal(ops.linear(X, packed(), N, strided), ops.linear(X, packed(), N, bias))
        assert torch.allclose(ops.linear(X, packed(), N, strided), F.linear(X, random(N, K), bias.float()), atol=1e-4)


def test_row_other_and_vector_input_agree() -> None:
    row = random(N, seed=3)
    expected = F.linear(X, random(N, K)) + row
    assert torch.allclose(ops.linear(X, packed(), N, binary="add", other=row), expected, atol=1e-4)
    assert torch.allclose(ops.linear(X[0], packed(), N, binary="add", other=row), expected[0], atol=1e-4)
    assert torch.allclose(ops.linear(X, packed(), N, binary="add", other=row.expand(3, N)), expected, atol=1e-4)


def test_row_scales_of_any_stride() -> None:
    q, scale = random(2, 3, K, dtype=torch.uint8), random(6).abs() + 0.1
    zero_point = torch.arange(6, dtype=torch.int32)
    expected = ops.qlinear(q, scale, zero_point, packed_int8(), N)
    strided_scale = torch.stack([scale, -scale], 1)[:, 0]
    strided_zero_point = torch.stack([zero_point, zero_point + 1], 1)[:, 0]
    assert torch.equal(ops.qlinear(q, strided_scale, strided_zero_point, packed_int8(), N), expected)
    weight, column_scale, _ = ops.linear_unpack_int8(packed_int8(), N, K)
    real = (q.double() - zero_point.view(2, 3, 1)) * scale.view(2, 3, 1)
    assert torch.allclose(expected.double(), F.linear(real, weight.double() * column_scale[:, None]), rtol=1e-4)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_sizes(dtype: torch.dtype) -> None:
    for shape in ((0, K), (2, 0, K), (0, 3, K)):
        out = ops.linear(random(*shape, dtype=dtype), packed(dtype), N)
        assert out.shape == (*shape[:-1], N)
        assert ops.linear_gated(random(*shape), packed_gated(dtype), N).shape == out.shape
        assert all(t.shape == out.shape for t in ops.linear_norm(random(*shape), packed(dtype), N, return_sum=True))
    assert ops.linear(random(3, K, dtype=dtype), packed(dtype, n=0), 0).shape == (3, 0)
    assert ops.linear(random(3, 0), packed(dtype, n=0, k=0), 0, random(0)).shape == (3, 0)
    bias, other = random(N), random(3, N, seed=1)
    out = ops.linear(random(3, 0), packed(dtype, k=0), N, bias, activation="relu", binary="add", other=other)
    assert torch.allclose(out, bias.relu() + other)
    gated = ops.linear_gated(random(3, 0), packed_gated(dtype, k=0), N, bias, other[0])
    assert torch.allclose(gated, (F.silu(bias) * other[0]).expand(3, N), atol=1e-5)


@pytest.mark.sanitize
def test_zero_sizes_int8() -> None:
    empty = torch.empty(0)
    assert ops.qlinear(random(0, K, dtype=torch.uint8), ONE, None, packed_int8(), N).shape == (0, N)
    assert ops.qlinear(random(0, K, dtype=torch.uint8), empty, empty.int(), packed_int8(), N).shape == (0, N)
    nothing = ops.qlinear(random(3, 0, dtype=torch.int8), ONE, None, packed_int8(k=0), N, random(N))
    assert torch.equal(nothing, random(N).expand(3, N))


def test_empty_sum_unless_asked_for() -> None:
    out, total = ops.linear_norm(X, packed(), N)
    assert total.shape == (0,)
    assert total.dtype == out.dtype


# ---- Gradients -----------------------------------------------------------------------------------------------------


def test_gradient_is_refused_not_lost() -> None:
    x, bias = X.clone().requires_grad_(), torch.nn.Parameter(random(N))
    for wants_gradient in (x, x * 2):
        with pytest.raises(RuntimeError, match="xopt::linear: input: requires a gradient, but this op has none"):
            ops.linear(wants_gradient, packed(), N)
    with pytest.raises(RuntimeError, match="xopt::linear: bias: requires a gradient"):
        ops.linear(X, packed(), N, bias)
    geometry = {"stride": [1], "padding": [0, 0], "dilation": [1]}
    weight = ops.conv_pack(random(2, 3, 1), 1, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="xopt::conv: scale: requires a gradient"):
        ops.conv(random(1, 3, 4), weight, [2, 3, 1], scale=torch.nn.Parameter(random(2)), **geometry)
    with pytest.raises(RuntimeError, match="xopt::linear_gated: up_bias: requires a gradient"):
        ops.linear_gated(X, packed_gated(), N, None, bias)
    with pytest.raises(RuntimeError, match="xopt::linear_norm: norm_weight: requires a gradient"):
        ops.linear_norm(X, packed(), N, norm_weight=bias)
    with pytest.raises(RuntimeError, match="xopt::attention: value: requires a gradient"):
        ops.attention(HEADS, HEADS, HEADS.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="xopt::layer_norm: weight: requires a gradient"):
        ops.layer_norm(X, torch.nn.Parameter(random(K)))
    with pytest.raises(RuntimeError, match="xopt::rotary: cos: requires a gradient"):
        ops.rotary(HEADS, HEADS, ANGLES.clone().requires_grad_(), ANGLES)
    with pytest.raises(RuntimeError, match="xopt::qlinear: bias: requires a gradient"):
        ops.qlinear(Q, ONE, None, packed_int8(), N, bias)
    quantized = ops.conv_pack_int8(random(2, 3, 1, dtype=torch.int8), ONE)
    with pytest.raises(RuntimeError, match="xopt::qconv: bias: requires a gradient"):
        ops.qconv(Q.view(1, 3, K), ONE, None, quantized, [2, 3, 1], torch.nn.Parameter(random(2)), **geometry)


def test_without_grad_mode_parameters_are_fine() -> None:
    x, bias = X.clone().requires_grad_(), torch.nn.Parameter(random(N))
    expected = ops.linear(X, packed(), N, bias.detach())
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = ops.linear(x, packed(), N, bias)
            assert torch.equal(out, expected)
            assert not out.requires_grad
    assert not ops.linear(x.detach(), packed(), N, bias.detach()).requires_grad


def test_packing_a_parameter_is_no_question_of_gradients() -> None:
    weight = torch.nn.Parameter(random(N, K))
    assert torch.equal(ops.linear_pack(weight, dtype=torch.float32), packed())


# ---- torch.compile and torch.export --------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """One of each op that has an input, fed one by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Buffer(packed())
        self.gated = torch.nn.Buffer(packed_gated(n=K, k=N))
        self.quantized = torch.nn.Buffer(packed_int8())
        self.bias = torch.nn.Buffer(random(N))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = ops.linear(x, self.up, N, self.bias, activation="gelu_erf")
        back = ops.linear_gated(hidden, self.gated, K) + x
        normed, total = ops.linear_norm(back, self.up, N, self.bias, hidden, return_sum=True)
        scale = back.abs().amax() / 127
        quantized = (back / scale).round().to(torch.int8)
        return normed, total, ops.qlinear(quantized, scale.view(1), None, self.quantized, N, activation="relu")


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    block = Block()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for shape in ((2, 3), (4, 5), (3, 7)):
            x = random(*shape, K)
            assert_same(compiled(x), block(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "recompiled for a new size"


def test_compile_of_packing() -> None:
    def repacked(weight: Tensor) -> Tensor:
        out_features, in_features = weight.shape
        bytes_of = ops.linear_pack(weight, dtype=torch.bfloat16)
        return torch.as_tensor(ops.linear_unpack(bytes_of, out_features, in_features, torch.bfloat16))

    torch._dynamo.reset()
    compiled = torch.compile(repacked, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((33, 65), (70, 20)):
        assert torch.equal(compiled(random(*shape)), random(*shape).bfloat16())


def test_export() -> None:
    block = Block()
    rows = torch.export.Dim("rows", min=1, max=1000)
    with torch.no_grad():
        program = torch.export.export(block, (random(4, K),), dynamic_shapes=({0: rows},))
        targets = {str(node.target) for node in program.graph.nodes}
        assert {"xopt.linear.default", "xopt.linear_gated.default", "xopt.qlinear.default"} <= targets
        for count in (1, 9):
            assert_same(program.module()(random(count, K)), block(random(count, K)))


def test_fakes_tell_what_the_ops_return() -> None:
    for op in registered_ops():
        for args, kwargs in samples_of(op):
            real = getattr(ops, op)(*args, **kwargs)
            args, kwargs = tree_map_only(Tensor, lambda value: value.to("meta"), (args, kwargs))
            meta = getattr(ops, op)(*args, **kwargs)
            reals, metas = (result if isinstance(result, (tuple, list)) else [result] for result in (real, meta))
            for a, b in zip(reals, metas, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), op


def test_fake_refuses_a_gradient_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ops.linear(x, packed(), N), backend="aot_eager")
    with pytest.raises(Exception, match="requires a gradient, but this op has none"):
        compiled(X.clone().requires_grad_())
