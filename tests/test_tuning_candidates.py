"""What autotuning may choose for attention, convolutions and products with weights of a few bits: every
candidate, at every level, is as right as the heuristics' own choice, and the same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import xopt
from tests import families
from tests.test_attention import AttentionCase, call, inputs, mask_of
from tests.test_conv import ConvCase
from tests.test_qconv import QConvCase
from tests.test_weight_only import WeightOnlyCase
from xopt import _C, tuning

THREADS = 3

# Several blocks of keys and items by each candidate; tails of rows, keys and columns; few queries, which go apart.
ATTENTION = (
    AttentionCase(queries=150, keys=1100, depth=17, value_depth=33, causal=True, causal_offset=900, window=700),
    AttentionCase(seed=1, heads=2, group=2, queries=67, keys=131, depth=24, value_depth=40, mask="f32", mask_dims="k"),
    AttentionCase(seed=2, queries=3, group=2, keys=2100, depth=20, value_depth=35, causal=True, causal_offset=2095),
    AttentionCase(seed=3, queries=1, keys=65, depth=16, value_depth=16, mask="bool", mask_dims="qk"),
)
# Lines longer than the longest strip, and shorter than eight outputs; more channels than the largest chunk.
DEPTHWISE: dict[str, Any] = {
    "long lines": {"size": "3x75", "groups": 37, "kernel": "3x3", "stride": "1x2", "padding": "1x1x1x1"},
    "wide lines": {"size": "2x67", "groups": 3, "kernel": "1x5", "padding": "0x0x2x2", "dilation": "1x2"},
    "many channels": {"images": 2, "size": "4x5", "groups": 290, "kernel": "3x3", "padding": "1x1x1x1"},
}


# Rows out of a padded image, and patches; pieces of k that end within tiles; channels that are interleaved.
DENSE: dict[str, Any] = {
    "even lines": {"size": "9x20", "channels": 32, "out_channels": 40, "kernel": "3x3", "padding": "1x1x1x1"},
    "odd lines": {"images": 2, "size": "5x7", "channels": 20, "out_channels": 9, "kernel": "3x3", "padding": "1x1x1x1"},
    "few channels": {"size": "13x30", "channels": 3, "out_channels": 32, "kernel": "5x7", "stride": "2x2",
                     "padding": "2x2x3x3", "layout": "contiguous"},
}  # fmt: skip


def sanitized(dtype: str) -> Any:
    return pytest.param(dtype, marks=pytest.mark.sanitize)


FLOATS = (sanitized("f32"), sanitized("bf16"), "f16")


@pytest.fixture(autouse=True)
def _restored(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("xopt.tuning.scope._was_read", False)
    level, threads = _C.active_isa(), torch.get_num_threads()
    _C.forget_tuned()
    yield
    _C.forget_tuned()
    _C.cap_isa(level)
    torch.set_num_threads(threads)


def levels() -> list[str]:
    return list(_C.isa_levels()[: _C.isa_levels().index(_C.active_isa()) + 1])


def check_all(family: str, made: Sequence[Any], kernel: str, dtype: str) -> None:
    """Against the operator's own float64 reference."""
    own = families.find_family(family)
    for level in levels():
        _C.cap_isa(level)
        candidates = _C.tuning_candidates(kernel, dtype, THREADS)
        assert len(candidates) > 4
        for text, choice in candidates:
            with tuning.forced(choice):
                for case in made:
                    try:
                        own.run(case)
                    except families.CaseFailure as failure:
                        raise AssertionError(f"{text}, at level {level}: {failure}") from failure


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_is_right_by_each_candidate(dtype: str) -> None:
    check_all("attention", [with_fields(case, dtype=dtype) for case in ATTENTION], "attention", dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_convolutions_are_right_by_each_candidate(dtype: str) -> None:
    made = [ConvCase(**fields, packed=dtype, input=dtype, weight=dtype, bias="f32") for fields in DENSE.values()]
    check_all("conv", made, "conv", dtype)
    _C.cap_isa(levels()[-1])
    assert any("patches" in text for text, _ in _C.tuning_candidates("conv", dtype, THREADS))


@pytest.mark.parametrize("dtype", FLOATS)
def test_depthwise_convolutions_are_right_by_each_candidate(dtype: str) -> None:
    made = [ConvCase(**fields, packed=dtype, input=dtype, weight=dtype, bias="f32") for fields in DEPTHWISE.values()]
    check_all("conv", made, "conv_depthwise", "f32")


@pytest.mark.parametrize("dtype", [sanitized("u8"), "s8"])
def test_depthwise_int8_convolutions_are_right_by_each_candidate(dtype: str) -> None:
    zeros: Any = {"input_zero_point": "all", "weight_zero_point": "rows"}
    made = [QConvCase(**fields, **zeros, input=dtype, input_values="normal") for fields in DEPTHWISE.values()]
    check_all("qconv", made, "conv_depthwise", f"{dtype}s8")


def with_fields(case: AttentionCase, **fields: Any) -> AttentionCase:
    return AttentionCase(**{**vars(case), **fields})


def attend(case: AttentionCase) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    query, key, value = inputs(case, generator)
    return call(case, query, key, value, mask_of(case, generator))


def convolve(groups: int, size: int) -> torch.Tensor:
    torch.manual_seed(0)
    image = torch.randn(2, groups, 9, size).to(memory_format=torch.channels_last)
    weight = torch.randn(groups, 1, 3, 3)
    packed = torch.ops.xopt.conv_pack(weight, groups, dtype=torch.float32)
    geometry: Any = {"stride": [1, 1], "padding": [1, 1, 1, 1], "dilation": [1, 1], "groups": groups}
    return torch.as_tensor(torch.ops.xopt.conv(image, packed, list(weight.shape), **geometry))


@pytest.mark.parametrize(
    ("kernel", "dtype", "run"),
    [
        *(("attention", "f32", lambda case=case: attend(case)) for case in ATTENTION),
        *(("attention", "bf16", lambda case=case: attend(with_fields(case, dtype="bf16"))) for case in ATTENTION),
        ("conv_depthwise", "f32", lambda: convolve(130, 35)),
    ],
)
def test_each_candidate_gives_the_same_bits_for_any_number_of_threads(kernel: str, dtype: str, run: Any) -> None:
    for text, choice in _C.tuning_candidates(kernel, dtype, THREADS):
        results = []
        for count in (1, 2, THREADS, 5):
            torch.set_num_threads(count)
            with tuning.forced(choice):
                results.append(run())
        assert all(torch.equal(result, results[0]) for result in results), text


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(32, 32, 3, padding=1, groups=32)
        self.project = nn.Linear(32, 96)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.depthwise(rows.transpose(1, 2)).transpose(1, 2)
        query, key, value = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.project(rows).split(32, -1))
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def test_tune_finds_them_and_report_and_profile_name_the_instance() -> None:
    model, rows = xopt.optimize(Block().eval()), torch.randn(2, 40, 32)
    expected = model(rows)
    found = {each.kernel: each for each in xopt.tune(model, rows).tuned}
    assert {"gemm", "attention", "conv_depthwise"} <= set(found)
    assert found["attention"].size == "2x2x40x40x16"
    assert found["conv_depthwise"].size.startswith("2x32x")
    torch.testing.assert_close(model(rows), expected)
    for kernel, choice in (("attention", [-1, 2, 0, 0, 0, 0]), ("conv_depthwise", [-1, 1, 1, 0, 0, 0])):
        key = found[kernel]
        _C.add_tuned(key.kernel, key.dtype, key.level, key.threads, list(key.sizes), choice, 1.0, 2.0)
    torch.testing.assert_close(model(rows), expected)
    level = {kernel: _C.find_kernel(kernel, "f32") for kernel in ("attention", "conv_depthwise")}
    report = str(xopt.report(model))
    assert f"{level['attention']}, 64 keys" in report
    assert f"{level['conv_depthwise']}, 1 panels, rows/2" in report
    taken = xopt.profile(model, rows, steps=1, warmup=1, roofs=False)
    names = [kernel.name for kernel in taken.kernels]
    assert any(f"attention[f32,{level['attention']}, 64 keys]" in name for name in names), names
    assert any(f"[f32,{level['conv_depthwise']}, 1 panels, rows/2]" in name for name in names), names


@pytest.mark.parametrize("dtype", [sanitized("f32"), "bf16"])
def test_weight_only_products_are_right_by_each_candidate(dtype: str) -> None:
    made = [
        WeightOnlyCase(lead="37", n=335, k=100, bits=4, group=32, zero_point=True, bias="f32", input=dtype),
        WeightOnlyCase(lead="1", n=70, k=65, gated=True, activation="silu", input=dtype),
    ]
    check_all("weight_only", made, "gemm_weight_only", dtype)


def test_weight_only_products_are_tuned_and_named_by_the_level_that_multiplies() -> None:
    codes = torch.randint(-7, 8, (48, 64), dtype=torch.int8)
    packed = torch.ops.xopt.linear_pack_weight_only(codes, torch.rand(48, 2), bits=4, group_size=32)
    rows = torch.randn(5, 64)
    expected = torch.ops.xopt.linear_weight_only(rows, packed, 48)
    with tuning.ModelTuning("max"):
        torch.ops.xopt.linear_weight_only(rows, packed, 48)
    (found,) = tuning.known()
    assert (found.kernel, found.size) == ("gemm_weight_only", "5x48x64")
    candidates = _C.tuning_candidates("gemm_weight_only", "f32", THREADS)
    assert candidates == _C.tuning_candidates("gemm", "f32", THREADS)
    for text, choice in candidates:
        _C.reset_kernel_calls()
        with tuning.forced(choice):
            torch.testing.assert_close(torch.ops.xopt.linear_weight_only(rows, packed, 48), expected)
        assert families.kernel_calls()[f"gemm f32 {text.partition(',')[0]}"] == 1, text
    key = found.kernel, found.dtype, found.level, found.threads, list(found.sizes)
    _C.add_tuned(*key, [-1, 2, 0, 0, 0, 0], 1.0, 2.0)
    with tuning.ModelTuning("use"):
        taken = xopt.profile(torch.ops.xopt.linear_weight_only, rows, packed, 48, steps=1, warmup=1, roofs=False)
    instance = f"{_C.find_kernel('gemm', 'f32')}, 2 panels"
    assert f"linear_weight_only[f32,{instance}] 5x48x64" in [kernel.name for kernel in taken.kernels]


def test_decoding_is_tuned_once_for_many_lengths_of_the_cache() -> None:
    with tuning.ModelTuning("max"):
        for keys in (129, 130, 200, 256):
            query, cache = torch.randn(1, 2, 1, 16), torch.randn(1, 2, keys, 16)
            torch.ops.xopt.attention(query, cache, cache, causal=True, causal_offset=keys - 1)
    (found,) = [each for each in tuning.known() if each.kernel == "attention"]
    assert found.size == "1x2x1x256x16"


def test_several_lengths_of_queries_are_tuned_apart() -> None:
    with tuning.ModelTuning("max"):
        for queries in (20, 21):
            heads = torch.randn(1, 1, queries, 16)
            torch.ops.xopt.attention(heads, heads, heads)
            torch.ops.xopt.attention(heads, heads, heads, causal=True)
            torch.ops.xopt.attention(heads[:, :, :0], heads, heads)
    assert len([each for each in tuning.known() if each.kernel == "attention"]) == 4
