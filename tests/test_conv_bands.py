"""Convolutions that a chain does some lines of the image at a time: the same results as one after the other."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import pytest
import torch
from torch import nn

import xopt
from tests.test_chain import Calls, image, ops
from xopt import _C
from xopt.ops.chain import Given, Result
from xopt.ops.fakes import FLOATING

L2_BYTES: int = xopt.capabilities().caches.l2_bytes or 1 << 20


def kernel_calls(name: str) -> int:
    """In bands a kernel is called for each."""
    return sum(record["calls"] for record in _C.kernels() if record["name"] == name)


class Sequence:
    """Convolutions of which each reads the one before; their results do not stay in L2."""

    def __init__(self, seed: int, channels: int = 24, values: int = 0) -> None:
        torch.manual_seed(seed + values)
        self.draw = random.Random(seed)
        self.dtype = self.draw.choice(FLOATING)
        self.images = self.draw.choice((1, 1, 2, 3))
        side = {1: 190, 2: 131, 3: 112}[self.images]
        self.x = image(self.images, channels, side + self.draw.choice((0, 1)), side, dtype=self.dtype)
        if channels == 3:
            self.x = self.x.contiguous()
        self.calls = Calls(self.x)
        self.last: Given | Result = Given(0)

    def add(self, out: int, kernel: int = 1, depthwise: bool = False, stride: int = 1) -> None:
        before = self.calls.value(self.last)
        weight = torch.randn(out, 1 if depthwise else before.shape[1], kernel, kernel)
        weight /= (weight.shape[1] * kernel**2) ** 0.5
        dilation = self.draw.choice((1, 1, 2))
        reach = (kernel - 1) * dilation
        padding = [self.draw.choice((0, reach // 2, reach)) for _ in range(4)]
        sizes = [(before.shape[2 + i] + sum(padding[2 * i : 2 * i + 2]) - reach - 1) // stride + 1 for i in range(2)]
        options: dict[str, Any] = {}
        other = None
        if self.draw.random() < 0.3:
            other = self.calls.given(
                image(self.images, out, *sizes, dtype=self.draw.choice((self.dtype, torch.float32)))
            )
            options = {"binary": self.draw.choice(("add", "mul")), "activation_last": self.draw.random() < 0.5}
        self.calls.add(
            self.last,
            weight.to(self.dtype),
            other,
            out if depthwise else 1,
            stride=[stride] * 2,
            dilation=[dilation] * 2,
            padding=padding,
            bias=torch.randn(out) if self.draw.random() < 0.7 else None,
            scale=torch.rand(out) if self.draw.random() < 0.3 else None,
            activation=self.draw.choice(("none", "relu", "silu")),
            out_dtype=self.draw.choice((self.dtype, self.dtype, torch.float32)),
            **options,
        )
        self.last = Result(len(self.calls.results) - 1)

    def pool(self) -> None:
        kernel = self.draw.choice((2, 3))
        window = {"kernel_size": [kernel] * 2, "stride": [self.draw.choice((1, 2, 3))] * 2}
        window |= {"padding": [self.draw.choice((0, 1)) for _ in range(2)]}
        named: dict[str, Any] = {"ceil_mode": self.draw.random() < 0.5, "count_include_pad": True, "divisor": 0}
        kind = self.draw.choice(("max", "max", "max", "average"))
        self.calls.call("pool", input=self.last, kind=kind, **window, dilation=[1, 1], **named)
        self.last = Result(len(self.calls.results) - 1)


def inverted_residuals(seed: int, values: int = 0) -> Sequence:
    draw = random.Random(seed + 1000)
    sequence = Sequence(seed, draw.choice((24, 24, 3)), values)
    channels = draw.choice((72, 96, 101))
    if draw.random() < 0.7:
        sequence.add(channels)
    else:
        sequence.add(channels, kernel=3, stride=draw.choice((1, 2)))
    pools = draw.random() < 0.4
    if pools:
        sequence.pool()
    else:
        sequence.add(channels, kernel=draw.choice((2, 3, 5)), depthwise=True, stride=draw.choice((1, 1, 2, 3)))
    if draw.random() < (0.4 if pools else 0.7):
        sequence.add(24)
    if draw.random() < 0.3:
        sequence.add(channels)
        sequence.add(channels, kernel=3, depthwise=True)
    return sequence


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.sanitize] if seed < 4 else []) for seed in range(30)]
)
def test_bands_give_what_single_convolutions_do(seed: int, torch_threads: None) -> None:
    calls = inverted_residuals(seed).calls
    last = len(calls.results) - 1
    torch.set_num_threads(1 + seed % 3)
    for _ in range(2):  # the second call knows how many were done together
        (result,) = ops.chain(*calls.arguments([last]))
        assert result.stride() == calls.results[last].stride()
        assert torch.equal(result, calls.results[last])


@pytest.mark.skipif(L2_BYTES < 1 << 19, reason="not even some lines stay in L2")
@pytest.mark.parametrize("images", [pytest.param(1, marks=pytest.mark.sanitize), 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_of_what_leaves_l2_is_done_in_bands(images: int, dtype: torch.dtype) -> None:
    """Like the stem of a ResNet."""
    torch.manual_seed(0)
    height = max(48, 4 * torch.get_num_threads() * L2_BYTES // (64 * 64 * dtype.itemsize))
    calls = Calls(image(images, 3, height, 128, dtype=dtype))
    weight, bias = torch.randn(64, 3, 7, 7).to(dtype) / 12, torch.randn(64)
    calls.add(Given(0), weight, stride=[2, 2], padding=[3, 3, 3, 3], bias=bias, activation="relu", out_dtype=dtype)
    window: dict[str, Any] = {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
    calls.call("pool", input=Result(0), kind="max", **window, ceil_mode=False, count_include_pad=True, divisor=0)
    for _ in range(3):
        before = kernel_calls("pool")
        (result,) = ops.chain(*calls.arguments([1]))
        assert kernel_calls("pool") - before > 2 * images
        assert torch.equal(result, calls.results[1])


def large_residual(images: int = 1) -> tuple[Calls, int]:
    """Widened to 96 channels, in lines of 32 pixels; the lines of each image are twice what L2 holds."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    height = max(24, 2 * threads * L2_BYTES // (32 * 96 * 4))
    calls = Calls(image(images, 24, height, 32))
    calls.add(Given(0), torch.randn(96, 24, 1, 1))
    calls.add(Result(0), torch.randn(96, 1, 3, 3), groups=96, padding=[1, 1, 1, 1])
    calls.add(Result(1), torch.randn(24, 96, 1, 1))
    return calls, height


@pytest.mark.sanitize
@pytest.mark.skipif(L2_BYTES < 1 << 19, reason="not even some lines stay in L2")
@pytest.mark.parametrize("images", [1, 3, 4])
def test_an_inverted_residual_that_leaves_l2_is_done_in_bands(images: int) -> None:
    calls, _ = large_residual(images)
    for _ in range(2):
        before = kernel_calls("conv_depthwise")
        (result,) = ops.chain(*calls.arguments([2]))
        assert kernel_calls("conv_depthwise") - before > 2 * images
        assert torch.equal(result, calls.results[2])


@pytest.mark.sanitize
@pytest.mark.skipif(L2_BYTES < 1 << 19, reason="not even some lines stay in L2")
def test_a_bottleneck_that_adds_its_input_is_done_in_bands() -> None:
    """What is between is small beside input and output, but the input is read twice."""
    torch.manual_seed(0)
    height = max(24, torch.get_num_threads() * L2_BYTES // (32 * 32 * 4))  # what is between is twice what L2 holds
    for own_input in (True, False):
        calls = Calls(image(1, 128, height, 32))
        added = Given(0) if own_input else calls.given(image(1, 128, height, 32))
        calls.add(Given(0), torch.randn(32, 128, 1, 1) / 11, activation="relu")
        calls.add(Result(0), torch.randn(32, 32, 3, 3) / 17, padding=[1, 1, 1, 1], activation="relu")
        calls.add(
            Result(1), torch.randn(128, 32, 1, 1) / 6, added, binary="add", activation="relu", activation_last=True
        )
        for _ in range(2):
            before = kernel_calls("conv")
            (result,) = ops.chain(*calls.arguments([2]))
            assert (kernel_calls("conv") - before > 2) == own_input
            assert torch.equal(result, calls.results[2])


def test_a_text_that_meets_other_inputs_plans_anew() -> None:
    """The same sizes in other layouts, which have no rows in order, and images too small for bands."""
    calls, height = large_residual()
    tensors, text = calls.arguments([2])
    ops.chain(tensors, text)
    wider = torch.zeros(1, 24, height, 40).to(memory_format=torch.channels_last)
    wider[..., :32] = tensors[0]
    gaps, small = wider[..., :32], tensors[0][:, :, :5]
    for x in (gaps, tensors[0].contiguous(), small, tensors[0][:0], tensors[0]):
        (result,) = ops.chain([x, *tensors[1:]], text)
        assert result.shape == (x.shape[0], 24, x.shape[2], 32)
        same = x.shape[2] - (x is small)  # below its last line the whole image goes on
        assert torch.equal(result[:, :, :same], calls.results[2][: len(x), :, :same])


def test_a_result_that_is_read_again_is_whole() -> None:
    calls, _ = large_residual()
    for returned, result in zip((0, 1, 2), ops.chain(*calls.arguments([0, 1, 2])), strict=True):
        assert torch.equal(result, calls.results[returned])


def test_an_error_in_the_middle_leaves_the_next_call_whole() -> None:
    calls, _ = large_residual()
    tensors, text = calls.arguments([2])
    with pytest.raises(RuntimeError, match="groups: expected a divisor of the 95"):
        ops.chain(tensors, text.replace("[96,1,3,3]", "[95,1,3,3]"))
    (result,) = ops.chain(tensors, text)
    assert torch.equal(result, calls.results[2])
    again, _ = large_residual()  # by single operators
    assert torch.equal(again.results[0], calls.results[0])


def test_autotuning_leaves_bands_as_they_are(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("xopt.tuning.scope._was_read", False)
    _C.forget_tuned()
    residual = (
        nn.Conv2d(24, 96, 1),
        nn.ReLU6(),
        nn.Conv2d(96, 96, 3, 1, 1, groups=96),
        nn.ReLU6(),
        nn.Conv2d(96, 24, 1),
    )
    _, height = large_residual()
    x = torch.randn(1, 24, height, 32)
    source = nn.Sequential(*residual).eval()
    optimized = xopt.optimize(source, config=xopt.Config(autotune="max"))
    with torch.inference_mode():
        optimized(x)  # records the forward by single operators, which are tuned
        tuned = len(_C.tuned_calls())
        torch.testing.assert_close(optimized(x), source(x), atol=1e-4, rtol=1e-4)
    assert len(_C.tuned_calls()) == tuned
    _C.forget_tuned()
