"""Tensors of any strides and sizes as operands of linear layers.

A plain comparison shows that arguments reach the kernel; numbers are checked elsewhere (tests/families.py).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.contracts.operands import FLOATS, ONE, K, N, Tensor, X, ops, packed, packed_gated, packed_int8, random


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
