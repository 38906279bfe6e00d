"""What linear layers of floats, and all that is fused to them, owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.operands import (
    FLOATS,
    BadArgument,
    Call,
    K,
    N,
    X,
    ops,
    packed,
    packed_gated,
    packed_int8,
    random,
)

ON_XPU = True
SCHEMAS = {
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
}


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


PAIR_OF_PANELS = packed(n=2 * N)
BAD_ARGUMENTS: list[BadArgument] = [
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
    (lambda: ops.linear_gated(X, packed(), N), "packed: expected a gated pair of weights .*, got a single one"),
    (lambda: ops.linear_gated(X, packed_gated(), N, random(3)), r"gate_bias: expected shape \[40\], got \[3\]"),
    (lambda: ops.linear_gated(X, packed_gated(), N, None, random(3)), r"up_bias: expected shape \[40\], got \[3\]"),
    (lambda: ops.linear_gated(X, packed_gated(), N, activation="glu"), "activation: expected one of .* got 'glu'"),
    (lambda: ops.linear_gated(X, packed_gated(), N, out_dtype=torch.int8), "out_dtype: expected one of .* got int8"),
    (lambda: ops.linear_norm(X, packed(), N, norm="batch"), "norm: expected one of layer_norm, rms_norm, got 'batch'"),
    (lambda: ops.linear_norm(X, packed(), N, norm_weight=random(3)), r"norm_weight: expected shape \[40\], got \[3\]"),
    (lambda: ops.linear_norm(X, packed(), N, norm_bias=random(3)), r"norm_bias: expected shape \[40\], got \[3\]"),
    (
        lambda: ops.linear_norm(X, packed(), N, None, random(N)),
        r"residual: expected the output's shape \[3, 40\], got \[40\]",
    ),
    (lambda: ops.linear_norm(X, packed(), N, eps=-1.0), "eps: expected a number of at least 0, got -1"),
    (lambda: ops.linear_norm(X, packed(), N, out_dtype=torch.int8), "out_dtype: expected one of .* got int8"),
    (lambda: ops.linear(X, PAIR_OF_PANELS, 32, first_column=5), "first_column: expected a multiple of 32 .* got 5"),
    (lambda: ops.linear(X, PAIR_OF_PANELS, 32, first_column=96), "first_column: expected a multiple of 32 .* got 96"),
    (lambda: ops.linear(X, PAIR_OF_PANELS, 32, first_column=64), "out_features: expected 16, .* got 32"),
    (lambda: ops.linear(X, PAIR_OF_PANELS, 20, first_column=32), "out_features: expected 48, .* got 20"),
]
