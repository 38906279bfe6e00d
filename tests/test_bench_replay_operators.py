"""Replay of each operator that xopt has, by itself and at each instance."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xopt
from xopt.bench import replay
from xopt.bench.replay_contender import RECORDED, blockings_of, levels_of
from xopt.bench.replay_operands import operands_of
from xopt.bench.replay_torch import torch_contenders
from xopt.modules.activation import ACTIVATIONS
from xopt.profiling import Profile

ops = torch.ops.xopt
F32 = torch.float32


def weight_only(bits: int, group: int, columns: int = 48, gated: bool = False) -> torch.Tensor:
    rows = columns * (2 if gated else 1)
    codes = torch.randint(-7, 8, (rows, 64), dtype=torch.int8)
    options: Any = {"bits": bits, "group_size": group, "gated": gated}
    return torch.as_tensor(ops.linear_pack_weight_only(codes, torch.rand(rows, 64 // group), **options))


def image(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    made = torch.randint(0, 255, shape, dtype=dtype) if dtype == torch.uint8 else torch.randn(shape).to(dtype)
    return made.to(memory_format=torch.channels_last)


def around(**others: Any) -> Any:
    return {"stride": [1, 1], "padding": [1, 1, 1, 1], "dilation": [1, 1], **others}


def qconv(images: int, groups: int = 1) -> Any:
    size = (16, 8 // groups if groups == 1 else 1, 3, 3) if groups == 1 else (groups, 1, 3, 3)
    weight = torch.randint(-127, 128, size, dtype=torch.int8)
    packed = ops.conv_pack_int8(weight, torch.full((1,), 0.01), None, groups)
    values = image(images, 8, 5, 5, dtype=torch.uint8)
    zero = torch.full((1,), 3, dtype=torch.int32)
    return ops.qconv(
        values, torch.full((1,), 0.02), zero, packed, list(size), torch.randn(size[0]), **around(groups=groups)
    )


def qlinear(rows: int) -> Any:
    packed = ops.linear_pack_int8(torch.randint(-127, 128, (48, 64), dtype=torch.int8), torch.full((48,), 0.01))
    values = torch.randint(0, 255, (rows, 64), dtype=torch.uint8)
    zero = torch.full((1,), 3, dtype=torch.int32)
    return ops.qlinear(values, torch.full((1,), 0.02), zero, packed, 48, activation="relu")


def conv(groups: int, dtype: torch.dtype) -> Any:
    size = [8, 8 // groups, 3, 3]
    packed = ops.conv_pack(torch.randn(size).to(dtype), groups, dtype=dtype)
    return ops.conv(image(2, 8, 6, 6, dtype=dtype), packed, size, torch.randn(8), **around(groups=groups))


def conv_transpose() -> Any:
    size, packing = [8, 8, 3, 3], {"stride": [2, 2], "dilation": [1, 1]}
    packed = ops.conv_transpose_pack(torch.randn(size), 1, **packing, dtype=F32)
    return ops.conv_transpose(image(2, 8, 5, 5), packed, size, padding=[1, 1], output_padding=[0, 0], **packing)


def linear(name: str) -> Any:
    packed = ops.linear_pack(torch.randn(48, 64), dtype=F32)
    return getattr(ops, name)(torch.randn(5, 64), packed, 48, torch.randn(48))


def linear_gated() -> Any:
    return ops.linear_gated(torch.randn(5, 64), ops.linear_pack_gated(*torch.randn(2, 48, 64), dtype=F32), 48)


def packed_rows() -> Any:
    packed = ops.linear_pack(torch.randn(48, 64), dtype=F32)
    return ops.packed_rows(packed, torch.randint(0, 48, (3, 4)), 48, 64, F32)


def recurrent() -> Any:
    return xopt.optimize(torch.nn.GRU(16, 24).eval())(torch.randn(5, 2, 16))


def rotary() -> Any:
    return ops.rotary(torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16), *torch.randn(2, 1, 6, 8))


def pool(kind: str) -> Any:
    sizes = {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
    return ops.pool(image(2, 8, 6, 6), kind, **sizes)


def attention(queries: int, keys: int, **options: Any) -> Any:
    cache, options = torch.randn(1, 2, keys, 16), options or {"causal_offset": keys - queries}
    return ops.attention(torch.randn(1, 2, queries, 16), cache, cache, causal=True, **options)


def linear_attention(steps: int) -> Any:
    query, value = torch.randn(1, steps, 2, 16), torch.randn(1, steps, 4, 16)
    return ops.linear_attention(query, query, value, -torch.rand(1, steps, 4), torch.rand(1, steps, 4), unit_eps=1e-6)


def selective_scan() -> Any:
    rows, states = torch.rand(2, 9, 20), torch.rand(2, 9, 4)
    return ops.selective_scan(rows, rows, -torch.rand(20, 4), states, states, gate=rows, softplus=True)


def causal_conv() -> Any:
    rows = torch.randn(2, 9, 20)
    return ops.causal_conv(rows, torch.randn(20, 4), torch.randn(20), torch.randn(2, 20, 4), silu=True)


CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: attention(20, 20),
    "attention, decoding": lambda: attention(1, 300),
    "attention, one of a text": lambda: attention(1, 300, one_sees_all=True),
    "attention, with sinks": lambda: attention(20, 20, sinks=torch.randn(2, 1, 1)),
    "causal_conv": causal_conv,
    "linear_attention": lambda: linear_attention(20),
    "linear_attention, decoding": lambda: linear_attention(1),
    "concat": lambda: ops.concat([torch.randn(1, 4, 9, 8), torch.randn(1, 1, 4, 8).transpose(1, 2)], -2),
    "combine": lambda: ops.combine(image(2, 8, 6, 5), torch.randn(2, 8, 1, 1), "mul"),
    "pointwise": lambda: ops.pointwise(
        [image(2, 8, 6, 5), torch.randn(8, 1, 1)], "mul:x0:x1;leaky_relu:v0:0.1;add:v1:0.5", torch.bfloat16
    ),
    "conv": lambda: conv(1, F32),
    "conv, depthwise": lambda: conv(8, F32),
    "conv, depthwise bf16": lambda: conv(8, torch.bfloat16),
    "conv_transpose": conv_transpose,
    "batch_norm": lambda: ops.batch_norm(
        image(2, 8, 4, 4), torch.randn(8), torch.rand(8), activation="relu", binary="add", other=image(2, 8, 4, 4)
    ),
    "group_norm": lambda: ops.group_norm(image(2, 8, 4, 4), 4, torch.randn(8), torch.randn(8), activation="silu"),
    "layer_norm": lambda: ops.layer_norm(
        torch.randn(5, 64), torch.randn(64), torch.randn(64), residual=torch.randn(5, 64)
    ),
    "rms_norm": lambda: ops.rms_norm(torch.randn(5, 64), torch.randn(64)),
    "unit_norm": lambda: ops.unit_norm(torch.randn(5, 64)),
    "linear": lambda: linear("linear"),
    "linear_gated": linear_gated,
    "linear_norm": lambda: linear("linear_norm"),
    "linear_weight_only": lambda: ops.linear_weight_only(torch.randn(5, 64), weight_only(4, 32), 48),
    "linear_weight_only, 8 bits": lambda: ops.linear_weight_only(torch.randn(5, 64), weight_only(8, 64), 48),
    "linear_weight_only, gated": lambda: ops.linear_weight_only(
        torch.randn(5, 64),
        weight_only(4, 64, gated=True),
        48,
        torch.randn(48),
        torch.randn(48),
        gated=True,
        activation="silu",
    ),
    "matmul": lambda: ops.matmul(torch.randn(2, 5, 64), torch.randn(64, 48), torch.randn(48), alpha=0.5),
    "packed_rows": packed_rows,
    "adaptive_pool": lambda: ops.adaptive_pool(image(2, 8, 7, 6), "max", [3, 1]),
    "adaptive_pool, average": lambda: ops.adaptive_pool(image(2, 8, 7, 6), "average", [1, 1]),
    "pool": lambda: pool("max"),
    "pool, average": lambda: pool("average"),
    "qconv": lambda: qconv(1),
    "qconv, many images": lambda: qconv(300),
    "qconv, depthwise": lambda: qconv(2, 8),
    "qlinear": lambda: qlinear(5),
    "recurrent": recurrent,
    "rotary": rotary,
    "selective_scan": selective_scan,
    "softmax": lambda: ops.softmax(torch.randn(5, 64)),
    "upsample": lambda: ops.upsample(image(1, 8, 4, 4), [8, 8], "linear"),
    "window_merge": lambda: ops.window_merge(torch.randn(1, 2, 2, 3, 3, 8), [6, 6], [1, 1]),
    "window_partition": lambda: ops.window_partition(torch.randn(1, 6, 6, 8), [3, 3], [-1, -1]),
    "upsample, nearest": lambda: ops.upsample(image(1, 8, 4, 4), [8, 8], "nearest"),
}
LINKS = ("chain",)
"""Profiles of a model have a chain's calls one by one."""


def test_each_operator_that_computes_is_here() -> None:
    assert {name.partition(",")[0] for name in CALLS} | set(LINKS) == set(xopt.ops.costs.COSTS)


@pytest.mark.parametrize("name", CALLS)
def test_it_is_replayed_at_each_level_and_by_each_blocking(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_COPIES", 2)
    monkeypatch.setattr(replay, "LEAST_ROUNDS", 2)
    call = CALLS[name]
    taken = xopt.profile(call, steps=1, warmup=1, roofs=False)
    operator = f"xopt::{name.partition(',')[0]}"
    kernel = recorded(taken, operator)
    result = replay.replay(kernel, all_instances=True, seconds=0.0)
    unknown = {who: reason for who, reason in result.failures.items() if "UnavailableError" not in reason}
    if name.startswith(("qconv", "qlinear")) and not xopt.capabilities().features["avx512_vnni"]:
        unknown.pop("oneDNN", None)  # without VNNI it sums pairs of products in 16 bits, which do not hold them
    assert not unknown, unknown
    instances = [*levels_of(kernel), *(instance for instance, _ in blockings_of(kernel))]
    assert {RECORDED, *(f"xopt, {instance}" for instance in instances)} <= set(result.cold)
    assert kernel_level(kernel) in levels_of(kernel) or name == "packed_rows"  # which has no instances
    if name.startswith(("attention", "conv", "qconv", "linear,", "qlinear")):
        assert len(instances) > len(levels_of(kernel))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS.keys() - {"leaky_relu", "clamp"}))  # those with parameters
def test_torch_replays_each_activation(activation: str) -> None:
    values = 3 * torch.randn(1, 8, 4, 4)
    named = {"input": values, "groups": 4, "activation": activation}
    expected = ACTIVATIONS[activation](torch.nn.functional.group_norm(values, 4), 0.0, 0.0)
    (contender,) = torch_contenders({"operator": "xopt::group_norm"}, lambda: named, all_instances=False)
    torch.testing.assert_close(contender.run(named), expected)


def recorded(taken: Profile, operator: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(taken.to_json())["kernels"]
    return next(kernel for kernel in found if kernel["operator"] == operator)


def kernel_level(kernel: dict[str, Any]) -> str:
    """That the profile names."""
    inside = kernel["name"].partition("[")[2].partition("]")[0]
    return str(inside.partition(",")[2])


def test_zero_points_are_those_of_int8_whatever_the_batch() -> None:
    taken = xopt.profile(lambda: qconv(300), steps=1, warmup=1, roofs=False)
    kernel = recorded(taken, "xopt::qconv")
    kernel["arguments"]["input_zero_point"] |= {"shape": [1000], "strides": [1]}
    zeros = operands_of(kernel)["input_zero_point"]
    assert 0 <= int(zeros.min()) <= int(zeros.max()) <= 127


def test_a_weight_of_a_few_bits_has_the_recorded_size_and_its_level_is_that_of_the_product() -> None:
    for name in [name for name in CALLS if name.startswith("linear_weight_only")]:
        taken = xopt.profile(CALLS[name], steps=1, warmup=1, roofs=False)
        kernel = recorded(taken, "xopt::linear_weight_only")
        assert list(operands_of(kernel)["packed"].shape) == kernel["arguments"]["packed"]["shape"]
        assert kernel_level(kernel) == xopt._C.find_kernel("gemm", "f32")


def test_a_band_of_keys_is_a_mask_for_torch() -> None:
    def banded() -> Any:
        heads = torch.randn(1, 2, 40, 16)
        mask = torch.randn(1, 1, 1, 40)
        return ops.attention(heads[:, :, :30], heads, heads, mask, causal=True, causal_offset=10, window=7)

    taken = xopt.profile(banded, steps=1, warmup=1, roofs=False)
    result = replay.replay(recorded(taken, "xopt::attention"), all_instances=False, seconds=0.0)
    assert {RECORDED, "torch"} == set(result.cold), result.failures
