"""Packed weights: bit-exact both ways, the pinned layout, damaged bytes, and a packed weight as a plain tensor."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pathlib
import pickle
from collections.abc import Callable

import pytest
import torch

from tests import fresh_process
from xopt import _C

Tensor = torch.Tensor
ops = torch.ops.xopt

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.int8: torch.int8}
HEADER_BYTES = 64
SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100)
SHAPES = [*itertools.product(SIZES, (0, 1, 3, 16, 33)), *itertools.product((1, 17, 40), SIZES), (300, 700), (257, 1025)]
LEVELS = list(_C.isa_levels())
PRESENT = LEVELS[: LEVELS.index(_C.detected_isa()) + 1]


def special_values() -> Tensor:
    """fp32 values at which rounding to 16 bits goes wrong first: ties, overflow, denormals, infinities and zeros."""
    patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
    tail = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (patterns[:, None] | tail).flatten().view(torch.float32)


def random_weight(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    return torch.randn(n, k, generator=generator).to(dtype)


def random_int8(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + k)
    zero_point = torch.randint(-50, 50, (n,), generator=generator, dtype=torch.int32)
    return random_weight(n, k, torch.int8), torch.rand(n, generator=generator) + 0.1, zero_point


def same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = BITS[actual.dtype]
    nan = expected.isnan() if expected.is_floating_point() else torch.zeros_like(expected, dtype=torch.bool)
    if actual.is_floating_point():
        assert torch.equal(actual.isnan(), nan), "a NaN was lost or made"
    assert torch.equal(actual.contiguous().view(bits)[~nan], expected.contiguous().view(bits)[~nan])


def strided_forms(weight: Tensor) -> dict[str, Tensor]:
    """The same matrix in memory of other strides and of odd addresses."""
    n, k = weight.shape
    wide = torch.full((n, 2 * k + 3), 77).to(weight.dtype)
    wide[:, 1 : 1 + k] = weight
    sparse = torch.full((n, 3 * k + 1), 77).to(weight.dtype)
    sparse[:, : 3 * k : 3] = weight
    return {
        "contiguous": weight,
        "transposed": weight.t().contiguous().t(),
        "row slice": wide[:, 1 : 1 + k],
        "strided": sparse[:, : 3 * k : 3],
        "strided transposed": sparse.t().contiguous().t()[:, : 3 * k : 3],
        "expanded": weight[:1].expand(n, k) if n else weight,
    }


def expected_panels(weights: list[Tensor]) -> Tensor:
    """The layout of csrc/kernels/packed.h, made by reshaping."""
    dtype = weights[0].dtype
    group = 4 // dtype.itemsize
    width = 16 if len(weights) == 2 else 32
    n, k = weights[0].shape
    panels, k_tiles = -(-n // width), -(-k // (16 * group))
    padded = torch.zeros(len(weights), panels * width, k_tiles * 16 * group, dtype=dtype)
    for matrix, weight in zip(padded, weights, strict=True):
        matrix[:n, :k] = weight
    if len(weights) == 2:
        tiles = padded.view(2, panels, 16, k_tiles, 16, group).permute(1, 3, 0, 4, 2, 5)
    else:
        tiles = padded.view(panels, 2, 16, k_tiles, 16, group).permute(0, 3, 1, 4, 2, 5)
    return tiles.contiguous().view(-1).view(torch.uint8)


# ---- Both ways -----------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_every_value_is_rounded_as_torch_rounds(source: torch.dtype, dtype: torch.dtype) -> None:
    values = special_values()
    if source != torch.float32:
        values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(source)
    for weight in (values.view(-1, 64), values.view(-1, 64).t()):
        n, k = weight.shape
        same_bits(ops.linear_unpack(ops.linear_pack(weight, dtype=dtype), n, k, dtype), weight.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_of_the_same_dtype_keep_all_bits(dtype: torch.dtype) -> None:
    bits = special_values().view(torch.int32) if dtype == torch.float32 else torch.arange(1 << 16).to(torch.int16)
    weight = bits.view(dtype).view(-1, 64)
    n, k = weight.shape
    unpacked = ops.linear_unpack(ops.linear_pack(weight, dtype=dtype), n, k, dtype)
    assert torch.equal(unpacked.view(BITS[dtype]), weight.view(BITS[dtype])), "a NaN's payload changed"


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_float_round_trip(source: torch.dtype, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        for weight in strided_forms(random_weight(n, k, source)).values():
            packed = ops.linear_pack(weight, dtype=dtype)
            same_bits(ops.linear_unpack(packed, n, k, dtype), weight.to(dtype))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gated_round_trip(dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        gate, up = random_weight(n, k, torch.float32), random_weight(n, k, torch.bfloat16, seed=1)
        for up_form in strided_forms(up).values():
            packed = ops.linear_pack_gated(gate, up_form, dtype=dtype)
            unpacked_gate, unpacked_up = ops.linear_unpack_gated(packed, n, k, dtype)
            same_bits(unpacked_gate, gate.to(dtype))
            same_bits(unpacked_up, up_form.to(dtype))


@pytest.mark.sanitize
def test_int8_round_trip() -> None:
    for n, k in SHAPES:
        weight, scale, zero_point = random_int8(n, k)
        for form in strided_forms(weight).values():
            packed = ops.linear_pack_int8(form, scale, zero_point)
            for actual, expected in zip(ops.linear_unpack_int8(packed, n, k), (form, scale, zero_point), strict=True):
                assert torch.equal(actual, expected)


def test_int8_parameters_of_one_value_are_for_all_columns() -> None:
    weight = random_weight(40, 20, torch.int8)
    for scale in (torch.tensor([0.5]), torch.tensor(0.5)):
        packed = ops.linear_pack_int8(weight, scale, torch.tensor([3], dtype=torch.int32))
        _, scales, zero_points = ops.linear_unpack_int8(packed, 40, 20)
        assert torch.equal(scales, torch.full((40,), 0.5))
        assert torch.equal(zero_points, torch.full((40,), 3, dtype=torch.int32))
    _, _, zero_points = ops.linear_unpack_int8(ops.linear_pack_int8(weight, torch.ones(40)), 40, 20)
    assert torch.equal(zero_points, torch.zeros(40, dtype=torch.int32))


def test_int8_parameters_may_be_strided() -> None:
    weight, scale, zero_point = random_int8(40, 20)
    spread_scale, spread_zero_point = torch.stack([scale, -scale], 1)[:, 0], torch.stack([zero_point] * 2, 1)[:, 1]
    packed = ops.linear_pack_int8(weight, spread_scale, spread_zero_point)
    assert torch.equal(packed, ops.linear_pack_int8(weight, scale, zero_point))


# ---- Layout --------------------------------------------------------------------------------------------------------


def test_float_layout_is_pinned() -> None:
    for dtype, (n, k) in itertools.product(FLOATS, SHAPES):
        weight = random_weight(n, k, dtype)
        assert torch.equal(ops.linear_pack(weight, dtype=dtype)[HEADER_BYTES:], expected_panels([weight]))


def test_gated_layout_is_pinned() -> None:
    for dtype, (n, k) in itertools.product(FLOATS, SHAPES):
        pair = [random_weight(n, k, dtype), random_weight(n, k, dtype, seed=1)]
        assert torch.equal(ops.linear_pack_gated(*pair, dtype=dtype)[HEADER_BYTES:], expected_panels(pair))


def test_int8_layout_is_pinned() -> None:
    for n, k in SHAPES:
        weight, scale, zero_point = random_int8(n, k)
        panels = expected_panels([weight])
        columns = -(-n // 32) * 32
        parameters = torch.zeros(3, columns, dtype=torch.int32)
        parameters[0, :n] = scale.view(torch.int32)
        parameters[1, :n] = weight.sum(1, dtype=torch.int32)
        parameters[2, :n] = zero_point
        packed = ops.linear_pack_int8(weight, scale, zero_point)
        assert torch.equal(packed[HEADER_BYTES:], torch.cat([panels, parameters.view(-1).view(torch.uint8)]))


def test_header_is_pinned() -> None:
    header = bytes(ops.linear_pack(torch.ones(3, 5), dtype=torch.bfloat16)[:HEADER_BYTES].tolist())
    assert header[:8] == b"xoptpack"
    assert header[8:24] == bytes([1, 0, 1, 0, 0]) + bytes(11)  # version, dtype bf16, not gated, no zero point
    sizes = [int.from_bytes(header[at : at + 8], "little") for at in (24, 32, 40)]
    assert sizes == [3, 5, HEADER_BYTES + 2048]
    checksum = 2166136261
    for byte in header[:60]:
        checksum = (checksum ^ byte) * 16777619 % 2**32
    assert int.from_bytes(header[60:], "little") == checksum


def test_bytes_do_not_depend_on_threads(torch_threads: None) -> None:
    weight = random_weight(1000, 700, torch.float32)
    packed = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        packed.append(ops.linear_pack(weight, dtype=torch.bfloat16))
    assert torch.equal(packed[0], packed[1])
    assert torch.equal(packed[0], packed[2])


# ---- Damage --------------------------------------------------------------------------------------------------------


def aligned_copy(values: Tensor) -> Tensor:
    """A clone, whose data torch's allocator aligns."""
    return values.clone()


def test_every_flipped_bit_of_the_header_is_found() -> None:
    packed = ops.linear_pack(torch.ones(3, 5), dtype=torch.float32)
    for byte, bit in itertools.product(range(HEADER_BYTES), range(8)):
        damaged = aligned_copy(packed)
        damaged[byte] ^= 1 << bit
        with pytest.raises(RuntimeError, match="xopt::linear_unpack: packed: expected a packed weight"):
            ops.linear_unpack(damaged, 3, 5, torch.float32)
    same_bits(ops.linear_unpack(packed, 3, 5, torch.float32), torch.ones(3, 5))


def test_a_header_with_a_right_checksum_that_lies_is_found() -> None:
    for at, value in ((8, 2), (10, 4), (10, 9), (11, 2), (12, 7), (24, 200), (31, 0xFF), (32, 77), (40, 1)):
        packed = bytearray(ops.linear_pack(torch.ones(3, 5), dtype=torch.float32).numpy().tobytes())
        packed[at] = value
        checksum = 2166136261
        for byte in packed[:60]:
            checksum = (checksum ^ byte) * 16777619 % 2**32
        packed[60:64] = checksum.to_bytes(4, "little")
        damaged = aligned_copy(torch.frombuffer(packed, dtype=torch.uint8))
        with pytest.raises(RuntimeError, match="packed: expected a packed weight"):
            ops.linear_unpack(damaged, 3, 5, torch.float32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda packed: packed[:-1], "it is truncated"),
        (lambda packed: packed[:HEADER_BYTES], "it is truncated"),
        (lambda packed: packed[: HEADER_BYTES - 1], "shorter than the 64 bytes of a header"),
        (lambda packed: packed[:0], "shorter than the 64 bytes of a header"),
        (lambda packed: torch.cat([packed, packed[:1]]), "it has more bytes than its header says"),
        (lambda packed: torch.zeros_like(packed), "it does not begin with 'xoptpack'"),
        (lambda packed: packed.view(1, -1), "expected a contiguous tensor of one dimension"),
        (lambda packed: torch.stack([packed, packed], 1)[:, 0], "expected a contiguous tensor of one dimension"),
        (lambda packed: packed.view(torch.int8), "expected dtype uint8, got int8"),
        (lambda packed: torch.cat([packed[:1], packed])[1:], "pass its clone"),
    ],
)
def test_bytes_that_are_no_packed_weight(damage: Callable[[Tensor], Tensor], message: str) -> None:
    packed = ops.linear_pack(torch.ones(3, 5), dtype=torch.float32)
    calls: list[Callable[[Tensor], object]] = [
        lambda damaged: ops.linear_unpack(damaged, 3, 5, torch.float32),
        lambda damaged: ops.linear_unpack_gated(damaged, 3, 5, torch.float32),
        lambda damaged: ops.linear_unpack_int8(damaged, 3, 5),
        lambda damaged: ops.linear(torch.ones(2, 5), damaged, 3),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=message):
            call(damage(packed))
    same_bits(ops.linear_unpack(packed, 3, 5, torch.float32), torch.ones(3, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: ops.linear_unpack(p, 4, 5, torch.float32), "out_features: expected 3, .* got 4"),
        (lambda p: ops.linear_unpack(p, 3, 6, torch.float32), "in_features: expected 5, .* got 6"),
        (lambda p: ops.linear_unpack(p, -1, 5, torch.float32), "out_features: expected 3, .* got -1"),
        (lambda p: ops.linear_unpack(p, 3, 5, torch.bfloat16), "dtype: expected float32, .* got bfloat16"),
        (lambda p: ops.linear_unpack(p, 3, 5, torch.int8), "dtype: expected one of float32, bfloat16, float16"),
        (lambda p: ops.linear_unpack_gated(p, 3, 5, torch.float32), "packed: expected a gated pair"),
        (lambda p: ops.linear_unpack_int8(p, 3, 5), "packed: expected float32, .* got int8"),
    ],
)
def test_unpacking_as_something_else(call: Callable[[Tensor], object], message: str) -> None:
    packed = ops.linear_pack(torch.ones(3, 5), dtype=torch.float32)
    with pytest.raises(RuntimeError, match=message):
        call(packed)


# ---- A packed weight is a plain tensor -----------------------------------------------------------------------------


def saved_and_loaded(packed: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    buffer.seek(0)
    return torch.as_tensor(torch.load(buffer))


CARRIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda packed: packed.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda packed: torch.as_tensor(pickle.loads(pickle.dumps(packed))),
    "torch.save": saved_and_loaded,
    "share_memory": lambda packed: packed.share_memory_(),
    "parameter": lambda packed: torch.nn.Parameter(packed, requires_grad=False).data,
    "raw bytes": lambda packed: torch.frombuffer(bytearray(packed.numpy().tobytes()), dtype=torch.uint8).clone(),
    "slice of a larger file": lambda packed: torch.cat([torch.zeros(8).byte(), packed])[8:].clone(),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_packed_weight_survives(carrier: str) -> None:
    weight = random_weight(50, 70, torch.float32)
    packed = CARRIERS[carrier](ops.linear_pack(weight, dtype=torch.bfloat16))
    same_bits(ops.linear_unpack(packed, 50, 70, torch.bfloat16), weight.bfloat16())
    weight_int8, scale, zero_point = random_int8(50, 70)
    packed = CARRIERS[carrier](ops.linear_pack_int8(weight_int8, scale, zero_point))
    assert torch.equal(ops.linear_unpack_int8(packed, 50, 70)[0], weight_int8)


def test_memory_of_packed_weights_is_given_back() -> None:
    gc.collect()  # models of tests before this one, which may lie in cycles
    before = _C.weight_bytes()
    packed = [ops.linear_pack(torch.ones(2048, 1024), dtype=torch.float32) for _ in range(3)]
    assert _C.weight_bytes() >= before + 3 * 2048 * 1024 * 4
    views = [weight[64:] for weight in packed]
    del packed
    assert _C.weight_bytes() >= before + 3 * 2048 * 1024 * 4, "freed under a view"
    del views
    assert _C.weight_bytes() <= before + 2 * 2**20


CHILD = """
import sys, torch, xopt
ops = torch.ops.xopt
given = torch.load(sys.argv[1])
weight = given["weight"]
n, k = weight.shape
results = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    own = ops.linear_pack(weight, dtype=dtype)
    assert torch.equal(own, given[dtype]), dtype
    assert torch.equal(ops.linear_unpack(given[dtype], n, k, dtype), weight.to(dtype)), dtype
    results[dtype] = ops.linear(given["input"], given[dtype], n)
torch.save(results, sys.argv[2])
"""


@pytest.mark.parametrize("level", PRESENT)
def test_weight_packed_here_is_used_at_another_level(level: str, tmp_path: pathlib.Path) -> None:
    weight = random_weight(70, 90, torch.float32)
    given: dict[object, Tensor] = {"weight": weight, "input": random_weight(5, 90, torch.float32, seed=1)}
    given |= {dtype: ops.linear_pack(weight, dtype=dtype) for dtype in FLOATS}
    torch.save(given, tmp_path / "given")
    done = fresh_process.run("-c", CHILD, str(tmp_path / "given"), str(tmp_path / "results"), XOPT_MAX_ISA=level)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results")
    for dtype in FLOATS:
        here = ops.linear(given["input"], given[dtype], 70)
        assert torch.allclose(results[dtype], here, rtol=0.02, atol=0.2), dtype
