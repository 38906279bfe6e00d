"""Convolutions that a chain does some lines of the image at a time: the same results as one after the other."""

from __future__ import annotations

import pathlib
import random

import pytest
import torch
from torch import nn

import xopt
from tests.test_chain import Calls, image, ops
from xopt import _C
from xopt.ops.chain import Given, Result
from xopt.ops.fakes import FLOATING


def depthwise_calls() -> int:
    return sum(record["calls"] for record in _C.kernels() if record["name"] == "conv_depthwise")


class Sequence:
    """Convolutions of which each reads the one before; their results do not stay in L2."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.draw = random.Random(seed)
        self.dtype = self.draw.choice(FLOATING)
        self.images = self.draw.choice((1, 1, 2, 3))
        side = {1: 190, 2: 131, 3: 112}[self.images]
        self.x = image(self.images, 24, side + self.draw.choice((0, 1)), side, dtype=self.dtype)
        self.calls = Calls(self.x)
        self.last: Given | Result = Given(0)

    def add(self, out: int, kernel: int = 1, depthwise: bool = False, **options: object) -> None:
        before = self.calls.value(self.last)
        channels = before.shape[1]
        weight = torch.randn(out, 1 if depthwise else channels, kernel, kernel) / kernel
        if not depthwise:
            weight /= channels**0.5
        stride, dilation = self.draw.choice((1, 1, 2)) if kernel > 1 else 1, self.draw.choice((1, 1, 2))
        reach = (kernel - 1) * dilation
        padding = [self.draw.choice((0, reach // 2, reach)) if kernel > 1 else 0 for _ in range(4)]
        sizes = [(before.shape[2 + i] + sum(padding[2 * i : 2 * i + 2]) - reach - 1) // stride + 1 for i in range(2)]
        other = None
        if self.draw.random() < 0.3:
            other = self.calls.given(image(self.images, out, *sizes, dtype=self.dtype))
            options |= {"binary": "add", "activation_last": self.draw.random() < 0.5}
        self.calls.add(
            self.last,
            weight.to(self.dtype),
            other,
            out if depthwise else 1,
            stride=[stride] * 2,
            dilation=[dilation] * 2,
            padding=padding,
            bias=torch.randn(out) if self.draw.random() < 0.7 else None,
            activation=self.draw.choice(("none", "relu", "silu")),
            out_dtype=self.dtype,
            **options,
        )
        self.last = Result(len(self.calls.results) - 1)


def inverted_residuals(seed: int) -> Sequence:
    sequence = Sequence(seed)
    channels = sequence.draw.choice((72, 96, 101))
    if sequence.draw.random() < 0.7:
        sequence.add(channels)
    else:
        sequence.add(channels, kernel=3)
    sequence.add(channels, kernel=sequence.draw.choice((3, 5)), depthwise=True)
    if sequence.draw.random() < 0.7:
        sequence.add(24)
    if sequence.draw.random() < 0.3:
        sequence.add(channels)
        sequence.add(channels, kernel=3, depthwise=True)
    return sequence


def test_bands_give_what_single_convolutions_do() -> None:
    threads, banded = torch.get_num_threads(), 0
    try:
        for seed in range(24):
            torch.set_num_threads(1 + seed % 3)
            calls = inverted_residuals(seed).calls
            last = len(calls.results) - 1
            before = depthwise_calls()
            (result,) = ops.chain(*calls.arguments([last]))
            banded += depthwise_calls() - before > 2  # of which a chain here has at most two
            assert result.stride() == calls.results[last].stride()
            assert torch.equal(result, calls.results[last]), f"inverted_residuals({seed})"
    finally:
        torch.set_num_threads(threads)
    assert banded >= 12, "hardly any of the chains was done in bands"


def test_a_result_that_is_read_again_is_whole() -> None:
    sequence = Sequence(0)
    sequence.add(96)
    sequence.add(96, kernel=3, depthwise=True)
    calls = sequence.calls
    for returned, result in zip((0, 1), ops.chain(*calls.arguments([0, 1])), strict=True):
        assert torch.equal(result, calls.results[returned])


@pytest.mark.parametrize("images", [0, 2])
def test_layouts_that_have_to_be_copied_are_computed_first(images: int) -> None:
    """One channel of one line: whether channels are last cannot be told, and a chain may meet empty results."""
    torch.manual_seed(3)
    calls = Calls(image(images, 1, 1, 7))
    calls.add(Given(0), torch.randn(1, 1, 1, 1))
    calls.add(Result(0), torch.randn(1, 1, 1, 3), padding=[0, 0, 1, 1])
    (result,) = ops.chain(*calls.arguments([1]))
    assert torch.equal(result, calls.results[1])


def test_an_error_in_the_middle_leaves_the_next_call_whole() -> None:
    sequence = Sequence(1)
    sequence.add(72)
    sequence.add(72, kernel=3, depthwise=True)
    calls = sequence.calls
    tensors, text = calls.arguments([1])
    with pytest.raises(RuntimeError, match="groups: expected a divisor of the 71"):
        ops.chain(tensors, text.replace("[72,1,3,3]", "[71,1,3,3]"))
    (result,) = ops.chain(tensors, text)
    assert torch.equal(result, calls.results[1])
    again = Sequence(1)
    again.add(72)
    assert torch.equal(again.calls.results[0], calls.results[0])


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
    x = torch.randn(2, 24, 131, 131)
    source = nn.Sequential(*residual).eval()
    optimized = xopt.optimize(source, config=xopt.Config(autotune="max"))
    with torch.inference_mode():
        optimized(x)  # records the forward by single operators, which are tuned
        tuned, before = len(_C.tuned_calls()), depthwise_calls()
        torch.testing.assert_close(optimized(x), source(x), atol=1e-4, rtol=1e-4)
    assert depthwise_calls() - before > 2
    assert len(_C.tuned_calls()) == tuned
    _C.forget_tuned()
