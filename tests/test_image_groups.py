"""Convolutions that move more than caches hold, run again some images at a time: the same results, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.test_chain import Calls, image, ops
from tests.test_conv_bands import L2_BYTES
from tests.test_runtime import not_when_sanitized
from xopt import _C
from xopt.ops.chain import Given, Result

CHANNELS, WIDTH = 32, 64
WINDOW: dict[str, Any] = {"kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1]}


@pytest.fixture(autouse=True)
def no_gradients(torch_threads: None) -> Iterator[None]:
    """Under grad mode nothing is run again. One thread: the least that an image has to be large."""
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def height_of(images: int, bytes_of_all: int) -> int:
    return max(8, bytes_of_all // (images * CHANNELS * WIDTH * 4))


def block(images: int, height: int, inputs: int = 1) -> Calls:
    """The second adds what the first reads, the fourth multiplies by what the third does, and the last has a stride."""
    torch.manual_seed(0)
    calls = Calls(*(image(images, CHANNELS, height, WIDTH) for _ in range(inputs)))
    named: dict[str, Any] = {"bias": torch.randn(CHANNELS), "activation": "relu"}
    square = torch.randn(CHANNELS, CHANNELS, 1, 1) / CHANNELS
    calls.add(Given(0), square, **named)
    calls.add(Result(0), square, Given(inputs - 1), binary="add", **named)
    calls.add(Result(1), torch.randn(CHANNELS, 1, 3, 3), groups=CHANNELS, padding=[1] * 4)
    calls.add(Result(2), square, Result(1), binary="mul", **named)
    calls.add(Result(3), square, stride=[2, 2])
    return calls


def check(calls: Calls, returned: list[int]) -> list[int]:
    """Returns how many calls of kernels were made again in each run after the first two, which tell what to note. All
    images at once and some at a time take turns, until both ways have been tried."""
    replayed = []
    for _ in range(12):
        before = _C.replayed_calls()
        results = ops.chain(*calls.arguments(returned))
        replayed.append(_C.replayed_calls() - before)
        for number, result in zip(returned, results, strict=True):
            assert result.stride() == calls.results[number].stride()
            assert torch.equal(result, calls.results[number])
    return replayed[2:]


@not_when_sanitized
@pytest.mark.parametrize("images", [5, 6])
@pytest.mark.parametrize("returned", [[4], [1, 4], [3]])
@pytest.mark.parametrize("inputs", [1, 2])
def test_some_images_at_a_time(images: int, returned: list[int], inputs: int) -> None:
    calls = block(images, height_of(images, 8 * L2_BYTES), inputs)
    by_turns = check(calls, returned)[:8]
    assert by_turns[0::2] == [len(calls.results)] * 4
    assert min(by_turns[1::2]) > 2 * len(calls.results)


@not_when_sanitized
def test_what_is_behind() -> None:
    """The average of pixels is none of what is done apart."""
    calls = block(6, height_of(6, 8 * L2_BYTES))
    calls.call("adaptive_pool", input=Result(3), kind="average", output_size=[1, 1])
    calls.add(Result(5), torch.randn(CHANNELS, CHANNELS, 1, 1))
    assert check(calls, [6])[1] > 2 * len(calls.results)
    assert check(calls, [6, 4])[1] > 2 * len(calls.results)


@not_when_sanitized
def test_pooling_between() -> None:
    torch.manual_seed(0)
    calls = Calls(image(6, CHANNELS, height_of(6, 8 * L2_BYTES), WIDTH))
    calls.add(Given(0), torch.randn(CHANNELS, CHANNELS, 1, 1))
    calls.call("pool", input=Result(0), kind="max", **WINDOW, ceil_mode=False, count_include_pad=True, divisor=0)
    for before in (1, 2):
        calls.add(Result(before), torch.randn(CHANNELS, CHANNELS, 1, 1))
    check(calls, [3])


@pytest.mark.sanitize
@pytest.mark.parametrize("images", [1, 6])
def test_small_ones_are_done_at_once(images: int) -> None:
    calls = block(images, 8)
    assert check(calls, [4]) == [len(calls.results)] * 10
