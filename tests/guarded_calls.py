"""python -m tests.guarded_calls end|start|outputs: calls whose tensors touch a forbidden page. See test_guard_pages.py.

Prints what it is about to do, so that after a fault the last line tells which call it was.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable

import torch

from tests.guard_pages import GuardedMemory

Tensor = torch.Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Rows around a tile and the small-row path, columns around a tile and a panel, sums around a tile of each dtype.
SIZES = [
    *(
        (1, 1, 1),
        (1, 15, 65),
        (1, 33, 31),
        (3, 1, 33),
        (3, 17, 1),
        (3, 31, 63),
        (17, 33, 33),
        (17, 17, 65),
        (17, 1, 31),
    ),
    *((4, 32, 64), (5, 16, 128), (16, 64, 32), (33, 48, 127), (2, 40, 1025), (130, 7, 3), (40, 300, 259)),
]

Place = Callable[[Tensor], Tensor]


def check(what: str, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, expected, strict=True):
        if not torch.equal(one, other):
            raise AssertionError(f"{what}: the result differs from that on plain memory")


class Caller:
    """Makes each call twice: on plain tensors, and on the same placed at the guard page (or with guarded outputs)."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.calls = 0
        self.library = ctypes.CDLL(None) if mode == "outputs" else None

    def call(
        self, what: str, op: Callable[..., object], *tensors: Tensor | None, **options: object
    ) -> tuple[Tensor, ...]:
        print(what, flush=True)
        self.calls += 1
        names = options.pop("named", {})
        assert isinstance(names, dict)

        def run(place: Place) -> tuple[Tensor, ...]:
            placed = [place(x) if isinstance(x, Tensor) else x for x in tensors]
            named = {key: place(x) for key, x in names.items()}
            result = op(*placed, **named, **options)
            return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]

        plain = run(lambda x: x)
        if self.library is not None:
            self.library.guarded_outputs_switch(1)
            guarded = run(lambda x: x)
            self.library.guarded_outputs_switch(0)
            check(what, guarded, plain)
            return plain
        memory = GuardedMemory()
        # Packed weights have to be aligned, and so have no free byte only where their size is a multiple of 64.
        guarded = run(lambda x: memory.place(x, self.mode == "end", 64 if is_packed(x) else 1))
        check(what, guarded, plain)
        memory.close()
        return plain


def is_packed(x: Tensor) -> bool:
    return x.dtype == torch.uint8 and x.ndim == 1 and bytes(x[:8].tolist()) == b"xoptpack"


def float_calls(caller: Caller, m: int, n: int, k: int, packed_dtype: torch.dtype, dtype: torch.dtype) -> None:
    ops = torch.ops.xopt
    where = f"{m}x{n}x{k} {dtype} by {packed_dtype}"
    x, weight, up = (torch.randn(shape).to(dtype) for shape in ((m, k), (n, k), (n, k)))
    bias, row, other = (torch.randn(shape).to(dtype) for shape in (n, n, (m, n)))
    (packed,) = caller.call(f"linear_pack {where}", ops.linear_pack, weight, dtype=packed_dtype)
    (gated,) = caller.call(f"linear_pack_gated {where}", ops.linear_pack_gated, weight, up, dtype=packed_dtype)
    caller.call(f"linear_unpack {where}", lambda p: ops.linear_unpack(p, n, k, packed_dtype), packed)
    caller.call(f"linear_unpack_gated {where}", lambda p: ops.linear_unpack_gated(p, n, k, packed_dtype), gated)
    for out in (*FLOATS, torch.int8):
        add = {"binary": "add", "named": {"other": other}}
        by_row = {"binary": "mul", "named": {"other": row}}

        def linear(x: Tensor, packed: Tensor, bias: Tensor, out: torch.dtype = out, **options: object) -> object:
            return ops.linear(x, packed, n, bias, activation="gelu_tanh", out_dtype=out, **options)

        caller.call(f"linear {where} to {out}, add", linear, x, packed, bias, **add)
        caller.call(f"linear {where} to {out}, mul by row", linear, x, packed, bias, **by_row)
    for out in FLOATS:

        def linear_gated(x: Tensor, packed: Tensor, b0: Tensor, b1: Tensor, out: torch.dtype = out) -> object:
            return ops.linear_gated(x, packed, n, b0, b1, out_dtype=out)

        def linear_norm(
            x: Tensor, packed: Tensor, bias: Tensor, residual: Tensor, out: torch.dtype = out, **vectors: Tensor
        ) -> object:
            return ops.linear_norm(x, packed, n, bias, residual, out_dtype=out, return_sum=True, **vectors)

        caller.call(f"linear_gated {where} to {out}", linear_gated, x, gated, bias, row)
        vectors = {"norm_weight": row, "norm_bias": bias}
        caller.call(f"linear_norm {where} to {out}", linear_norm, x, packed, bias, other, named=vectors)


def int8_calls(caller: Caller, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    ops = torch.ops.xopt
    where = f"{m}x{n}x{k} {dtype}"
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max + 1, (m, k), dtype=dtype)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale, zero = torch.rand(n), torch.randint(-9, 9, (n,), dtype=torch.int32)
    row_scale, row_zero = torch.rand(m), torch.randint(-9, 9, (m,), dtype=torch.int32)
    bias, other = torch.randn(n), torch.randn(m, n).to(torch.bfloat16)
    (packed,) = caller.call(f"linear_pack_int8 {where}", ops.linear_pack_int8, weight, scale, zero)
    caller.call(f"linear_unpack_int8 {where}", lambda p: ops.linear_unpack_int8(p, n, k), packed)
    for out in (torch.float32, torch.uint8):

        def qlinear(
            x: Tensor, scale: Tensor, zero: Tensor, packed: Tensor, bias: Tensor, other: Tensor, out: torch.dtype = out
        ) -> object:
            return ops.qlinear(x, scale, zero, packed, n, bias, binary="add", other=other, out_dtype=out)

        caller.call(f"qlinear {where} to {out}", qlinear, x, row_scale, row_zero, packed, bias, other)


def attention_calls(caller: Caller, queries: int, keys: int, depth: int, dtype: torch.dtype) -> None:
    where = f"{queries}x{keys}x{depth} {dtype}"
    query, key = (torch.randn(2, 2, rows, depth).to(dtype) for rows in (queries, keys))
    value, allowed, added = torch.randn(2, 2, keys, 33).to(dtype), torch.rand(queries, keys) < 0.7, torch.randn(keys)
    sinks = torch.randn(2, 1, 1).to(dtype)
    for mask in (None, allowed, added.to(dtype)):

        def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor) -> object:
            return torch.ops.xopt.attention(
                query, key, value, mask, causal=mask is None, causal_offset=keys // 2, sinks=sinks
            )

        caller.call(f"attention {where}", attention, query, key, value, mask, sinks)


def matmul_calls(caller: Caller, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    other = torch.randn(n).to(dtype)
    for turn_left, turn_right in itertools.product((False, True), repeat=2):
        left, right = (
            torch.randn(2, *(sizes[::-1] if turned else sizes)).to(dtype)
            for sizes, turned in (((m, k), turn_left), ((k, n), turn_right))
        )

        def matmul(
            left: Tensor,
            right: Tensor,
            other: Tensor,
            turn_left: bool = turn_left,
            turn_right: bool = turn_right,
        ) -> object:
            lefts, rights = left.mT if turn_left else left, right.mT if turn_right else right
            return torch.ops.xopt.matmul(lefts, rights, other, alpha=0.5)

        caller.call(f"matmul {m}x{n}x{k} {dtype}, turned: {turn_left} {turn_right}", matmul, left, right, other)


def norm_calls(caller: Caller, rows: int, columns: int, dtype: torch.dtype, other: torch.dtype) -> None:
    where = f"{rows}x{columns} {dtype} with {other}"
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, columns), columns, columns))
    residual, options = torch.randn(rows, columns).to(other), {"return_sum": True, "out_dtype": other}
    caller.call(f"layer_norm {where}", torch.ops.xopt.layer_norm, x, weight, bias)
    named = {"named": {"residual": residual}}
    caller.call(f"layer_norm {where}, residual", torch.ops.xopt.layer_norm, x, weight, bias, **named, **options)
    caller.call(f"rms_norm {where}, residual", torch.ops.xopt.rms_norm, x, weight, **named, **options)


def rotary_calls(caller: Caller, positions: int, half: int, kept: int, dtype: torch.dtype) -> None:
    where = f"{positions}x{2 * half}+{kept} {dtype}"
    query, key = (torch.randn(2, heads, positions, 2 * half + kept).to(dtype) for heads in (3, 2))
    cos, sin = torch.randn(1, positions, 2 * half), torch.randn(2, positions, 2 * half).to(dtype)
    for interleaved in (False, True):
        options = {"interleaved": interleaved}
        caller.call(f"rotary {where} {options}", torch.ops.xopt.rotary, query, key, cos, sin, **options)


def linear_attention_calls(caller: Caller, steps: int, depth: int, columns: int, dtype: torch.dtype) -> None:
    query, key = (torch.randn(1, steps, 2, depth).to(dtype) for _ in range(2))
    value, state = torch.randn(1, steps, 4, columns).to(dtype), torch.randn(1, 4, depth, columns)
    rate = torch.rand(1, steps, 4).to(dtype)
    for decay in (-torch.rand(1, steps, 4), -torch.rand(1, steps, 4, depth).to(dtype)):
        what = f"linear_attention {steps}x{depth}x{columns} {dtype}"
        caller.call(what, torch.ops.xopt.linear_attention, query, key, value, decay, rate, state, unit_eps=1e-6)


def selective_scan_calls(caller: Caller, steps: int, states: int, channels: int, dtype: torch.dtype) -> None:
    a, state, skip = -torch.rand(channels, states), torch.randn(1, channels, states), torch.randn(channels).to(dtype)
    for lead in ((1, steps), (steps, 1)):
        input, dt, gate = (torch.rand(*lead, channels).to(dtype) for _ in range(3))
        b, c = (torch.randn(*lead, states).to(dtype) for _ in range(2))
        what = f"selective_scan {lead}x{states}x{channels} {dtype}"
        begun = state if lead[0] == 1 else None
        caller.call(what, torch.ops.xopt.selective_scan, input, dt, a, b, c, skip, gate, skip, begun, softplus=True)


def causal_conv_calls(caller: Caller, steps: int, taps: int, channels: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(channels, taps).to(dtype), torch.randn(channels)
    for lead in ((1, steps), (steps, 1)):
        input, state = torch.randn(*lead, channels).to(dtype), torch.randn(lead[0], channels, taps + 1).to(dtype)
        what = f"causal_conv {lead}x{taps}x{channels} {dtype}"
        caller.call(what, torch.ops.xopt.causal_conv, input, weight, bias, state, silu=True)
        caller.call(f"{what}, no state", torch.ops.xopt.causal_conv, input, weight)


CONV_KERNELS = (((1, 1), 1, 0), ((3, 3), 1, 1), ((2, 3), 2, 0), ((7, 1), 3, 3))  # with stride and padding


def conv_calls(
    caller: Caller, channels: int, out: int, size: int, packed_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Images lie with their channels last, so it is such memory that is placed at the guard page."""
    ops = torch.ops.xopt
    for (kernel, stride, padding), groups in itertools.product(CONV_KERNELS, (1, channels)):
        where = f"{channels}x{size}x{size} by {kernel}, groups {groups}, {dtype} by {packed_dtype}"
        total = out if groups == 1 else channels
        weight = torch.randn(total, channels // groups, *kernel).to(dtype)
        pixels = torch.randn(2, size + 7, size, channels).to(dtype)
        geometry = {"stride": [stride] * 2, "padding": [padding] * 4, "dilation": [1, 1], "groups": groups}
        vectors = torch.randn(2, total).to(dtype)
        (packed,) = caller.call(f"conv_pack {where}", ops.conv_pack, weight, groups=groups, dtype=packed_dtype)

        def unpack(packed: Tensor, size: torch.Size = weight.shape, groups: int = groups) -> object:
            return ops.conv_unpack(packed, size, groups, packed_dtype)

        def conv(
            pixels: Tensor, packed: Tensor, bias: Tensor, scale: Tensor, other: Tensor | None = None, **options: object
        ) -> Tensor:
            if other is not None:
                options |= {"other": other.movedim(-1, 1), "binary": "add", "activation": "relu"}
            size, x = options.pop("size"), pixels.movedim(-1, 1)
            return torch.as_tensor(ops.conv(x, packed, size, bias, scale=scale, **options)).movedim(1, -1)

        caller.call(f"conv_unpack {where}", unpack, packed)
        options = geometry | {"size": weight.shape}
        (result,) = caller.call(f"conv {where}", conv, pixels, packed, vectors[0], vectors[1], **options)
        caller.call(f"conv {where}, add", conv, pixels, packed, vectors[0], vectors[1], result, **options)


def qconv_calls(caller: Caller, channels: int, out: int, size: int, dtype: torch.dtype) -> None:
    ops = torch.ops.xopt
    info, zero = torch.iinfo(dtype), torch.tensor([7], dtype=torch.int32)
    for (kernel, stride, padding), groups in itertools.product(CONV_KERNELS, (1, channels)):
        where = f"{channels}x{size}x{size} by {kernel}, groups {groups}, {dtype}"
        total = out if groups == 1 else channels
        weight = torch.randint(-128, 128, (total, channels // groups, *kernel), dtype=torch.int8)
        pixels = torch.randint(info.min, info.max + 1, (2, size + 7, size, channels), dtype=dtype)
        geometry = {"stride": [stride] * 2, "padding": [padding] * 4, "dilation": [1, 1], "groups": groups}
        scales, zeros, bias = torch.rand(total), torch.randint(-9, 9, (total,), dtype=torch.int32), torch.randn(total)
        for zero_points in (None, zeros):
            (packed,) = caller.call(
                f"conv_pack_int8 {where}", ops.conv_pack_int8, weight, scales, zero_points, groups=groups
            )

            def unpack(packed: Tensor, size: torch.Size = weight.shape, groups: int = groups) -> object:
                return ops.conv_unpack_int8(packed, size, groups)

            def qconv(
                pixels: Tensor, scale: Tensor, zero: Tensor, packed: Tensor, bias: Tensor, **options: object
            ) -> Tensor:
                size, x = options.pop("size"), pixels.movedim(-1, 1)
                return torch.as_tensor(ops.qconv(x, scale, zero, packed, size, bias, **options)).movedim(1, -1)

            caller.call(f"conv_unpack_int8 {where}", unpack, packed)
            options = geometry | {"size": weight.shape, "out_dtype": torch.int8}
            caller.call(f"qconv {where}", qconv, pixels, scales[:1], zero, packed, bias, **options)


def window_calls(caller: Caller, channels: int, size: int, dtype: torch.dtype) -> None:
    ops = torch.ops.xopt
    where, image = f"{channels}x{size}x{size} {dtype}", torch.randn(2, size + 7, size, channels).to(dtype)
    (windows,) = caller.call(
        f"window_partition {where}", lambda image: ops.window_partition(image, [3, 2], [-1, 4]), image
    )
    caller.call(f"window_merge {where}", lambda windows: ops.window_merge(windows, [size + 7, size], [1, -4]), windows)


def concat_calls(caller: Caller, first: int, second: int, columns: int, dtype: torch.dtype) -> None:
    where = f"{first}+{second}x{columns} {dtype}"
    parts = [torch.randn(2, rows, columns).to(dtype) for rows in (first, second, first)]
    caller.call(f"concat {where}", lambda *parts: torch.ops.xopt.concat(parts, 1), *parts)


def batch_norm_calls(caller: Caller, rows: int, columns: int, dtype: torch.dtype) -> None:
    vectors = torch.randn(columns), torch.rand(columns), torch.randn(columns).to(dtype), torch.randn(columns)
    x, other = torch.randn(2, rows, columns).to(dtype)

    def batch_norm(x: Tensor, other: Tensor, *vectors: Tensor) -> Tensor:
        result = torch.ops.xopt.batch_norm(x, *vectors, activation="relu", binary="add", other=other)
        return torch.as_tensor(result)

    caller.call(f"batch_norm {rows}x{columns} {dtype}", batch_norm, x, other, *vectors)


def combine_calls(caller: Caller, first: int, second: int, columns: int, dtype: torch.dtype) -> None:
    where = f"{first}x{second}x{columns} {dtype}"
    whole, factor = torch.randn(first, second, columns).to(dtype), torch.randn(first, 1, columns).to(dtype)
    caller.call(f"combine {where}", lambda one, other: torch.ops.xopt.combine(one, other, "mul"), whole, factor)
    rows = torch.randn(first, second, 1).to(dtype)
    caller.call(
        f"combine {where}, rows", lambda one, other: torch.ops.xopt.combine(one, other, "add", True), whole, rows
    )


def pointwise_calls(caller: Caller, first: int, second: int, columns: int, dtype: torch.dtype) -> None:
    where = f"{first}x{second}x{columns} {dtype}"
    whole, factor = torch.randn(first, second, columns).to(dtype), torch.randn(first, 1, columns)
    rows = torch.randn(first, second, 1).to(dtype)

    def pointwise(*inputs: Tensor) -> Tensor:
        return torch.as_tensor(torch.ops.xopt.pointwise(inputs, "mul:x0:x1;silu:v0;add:v1:x2;sub:v2:x3", dtype))

    caller.call(f"pointwise {where}", pointwise, whole, factor, rows, whole + 1)


def recurrent_calls(caller: Caller, batch: int, units: int, features: int, dtype: torch.dtype) -> None:
    from xopt.modules.packed_parameter import PackedParameter

    x, states = torch.randn(2, batch, features).to(dtype), torch.randn(2, 1, batch, units)
    sizes = torch.tensor([batch, batch // 2 + 1 if batch > 1 else 1])
    rows = torch.randn(int(sizes.sum()), features).to(dtype)
    for cell, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1)):
        weights = [
            PackedParameter.pack(torch.randn(gates * units, k), dtype, gates=gates).packed for k in (features, units)
        ]
        biases = torch.randn(2, gates * units).to(dtype)

        def recurrent(
            x: Tensor,
            weight_ih: Tensor,
            weight_hh: Tensor,
            bias_ih: Tensor,
            bias_hh: Tensor,
            hidden: Tensor,
            state: Tensor,
            sizes: Tensor | None = None,
            cell: str = cell,
        ) -> object:
            operands = [weight_ih, weight_hh, bias_ih, bias_hh]
            first = state if cell == "lstm" else None
            return torch.ops.xopt.recurrent(x, operands, hidden, first, sizes, cell=cell, hidden_size=units)

        where = f"{cell} {batch}x{units}x{features} {dtype}"
        caller.call(f"recurrent {where}", recurrent, x, *weights, *biases, *states)
        caller.call(f"recurrent {where}, packed", recurrent, rows, *weights, *biases, *states, sizes)


def main(mode: str) -> None:
    import xopt  # noqa: F401  (registers the operators)

    torch.manual_seed(0)
    caller = Caller(mode)
    for index, (m, n, k) in enumerate(SIZES):
        for packed_dtype in FLOATS:
            float_calls(caller, m, n, k, packed_dtype, packed_dtype)
        float_calls(caller, m, n, k, torch.bfloat16, FLOATS[index % 2 * 2])
        for dtype in (torch.uint8, torch.int8):
            int8_calls(caller, m, n, k, dtype)
        for dtype in FLOATS:
            attention_calls(caller, m, n, k, dtype)
            matmul_calls(caller, m, n, k, dtype)
            linear_attention_calls(caller, m, n, k, dtype)
            selective_scan_calls(caller, m, n, k, dtype)
            causal_conv_calls(caller, m, n, k, dtype)
            rotary_calls(caller, m, n, k % 4 * 2, dtype)
            concat_calls(caller, m, n, k, dtype)
            combine_calls(caller, m, n, k, dtype)
            pointwise_calls(caller, m, n, k, dtype)
            batch_norm_calls(caller, m, n, dtype)
            recurrent_calls(caller, m, n, k, dtype)
            norm_calls(caller, m, n, dtype, FLOATS[index % 3])
    for index, (channels, out, size) in enumerate(
        ((1, 1, 3), (3, 33, 5), (17, 5, 4), (32, 64, 3), (65, 16, 3), (32, 3, 12))
    ):
        for packed_dtype in FLOATS:
            conv_calls(caller, channels, out, size, packed_dtype, FLOATS[index % 3])
            conv_calls(caller, channels, out, size, packed_dtype, packed_dtype)
        for dtype in (*FLOATS, torch.int8):
            window_calls(caller, channels, size, dtype)
        for dtype in (torch.uint8, torch.int8):
            qconv_calls(caller, channels, out, size, dtype)
    print(f"calls made: {caller.calls}")


if __name__ == "__main__":
    main(sys.argv[1])
