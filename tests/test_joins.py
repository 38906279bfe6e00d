"""Images that a chain joins: written to where they are joined, wherever that can be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import calls_of
from tests.test_chain import image
from tests.test_replay import Program, changed, spoil
from xopt.ops.chain import Given, Result, calls_text

ops: Any = torch.ops.xopt
RUNS = 5


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Under grad mode nothing is run again: each call looks whether a gradient is wanted."""
    with torch.no_grad():
        yield


class Images:
    """A chain of what computes images of one size, and how many channels each result has."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.draw, self.dtype = random.Random(seed), dtype
        self.shape = (self.draw.choice((1, 2)), self.draw.choice((3, 7, 8)), self.draw.choice((4, 9)))
        self.program = Program([])
        self.channels: dict[Any, int] = {}
        first = self.given(self.image(self.draw.choice((8, 20, 32))))
        self.channels[first] = self.program.tensors[0].shape[1]

    def image(self, channels: int) -> Tensor:
        return image(self.shape[0], channels, *self.shape[1:], dtype=self.dtype)

    def given(self, tensor: Tensor) -> Given:
        self.program.tensors.append(tensor)
        return Given(len(self.program.tensors) - 1)

    def add(self, channels: int, op: str, *arguments: Any) -> Result:
        result = Result(self.program.add(op, *arguments))
        self.channels[result] = channels
        return result

    def conv(self, source: Any, out: int, kernel: int = 1, other: Any = None) -> Result:
        features = self.channels[source]
        weight = torch.randn(out, features, kernel, kernel) / (features * kernel**2) ** 0.5
        packed = self.given(ops.conv_pack(weight, dtype=self.dtype))
        geometry = ([*weight.shape], self.given(torch.randn(out)), [1, 1], [kernel // 2] * 4, [1, 1], 1, None)
        binary = "none" if other is None else "add"
        return self.add(
            *(out, "conv", source, packed, *geometry),
            *(self.draw.choice(("none", "relu")), 0.0, 0.0, binary, other, False, self.dtype),
        )

    def depthwise(self, source: Any) -> Result:
        features = self.channels[source]
        weight = torch.randn(features, 1, 3, 3) / 3
        packed = self.given(ops.conv_pack(weight, groups=features, dtype=self.dtype))
        geometry = ([*weight.shape], None, [1, 1], [1] * 4, [1, 1], features, None)
        after = ("relu", 0.0, 0.0, "none", None, False, self.dtype)
        return self.add(features, "conv", source, packed, *geometry, *after)

    def norm(self, source: Any) -> Result:
        features = self.channels[source]
        vectors = [self.given(torch.rand(features) + 0.5) for _ in range(2)]
        after = ("relu", 0.0, 0.0, "none", None, False, self.dtype)
        return self.add(features, "batch_norm", source, *vectors, None, None, 1e-5, *after)

    def pool(self, source: Any) -> Result:
        window = ([3, 3], [1, 1], [1, 1], [1, 1], False, True, 0)
        return self.add(self.channels[source], "pool", source, self.draw.choice(("max", "average")), *window)

    def upsample(self, source: Any) -> Result:
        """Of what is half as large."""
        half = ("max", [2, 2], [2, 2], [0, 0], [1, 1], True, True, 0)
        small = Result(self.program.add("pool", source, *half))
        after = ([*self.shape[1:]], self.draw.choice(("nearest", "linear")), False, None, None, None)
        return self.add(self.channels[source], "upsample", small, *after)

    def gated(self, source: Any) -> Result:
        """A factor for each channel, or an image that is added."""
        gate = Result(self.program.add("adaptive_pool", source, "average", [1, 1]))
        how, other = self.draw.choice((("mul", gate), ("add", self.conv(source, self.channels[source]))))
        return self.add(self.channels[source], "combine", source, other, how, self.draw.choice((True, False)))

    def steps(self, source: Any) -> Result:
        return self.add(self.channels[source], "pointwise", (source,), "silu:x0;mul:v0:1.5", self.dtype)

    def join(self, *parts: Any) -> Result:
        return self.add(sum(self.channels[part] for part in parts), "concat", parts, 1)

    def any(self) -> Any:
        return self.draw.choice(list(self.channels))

    def add_any(self) -> Result:
        of_one = ("depthwise", "norm", "pool", "upsample", "gated", "steps")
        kind = self.draw.choice(("conv", "conv", "sum", "join", "join", "join", *of_one))
        source = self.any()
        if kind == "conv":
            return self.conv(source, self.draw.choice((5, 8, 16, 33)), self.draw.choice((1, 3)))
        if kind == "sum":
            return self.conv(source, self.channels[other := self.any()], 1, other)
        if kind == "join":
            return self.join(*(self.any() for _ in range(self.draw.randint(1, 4))))
        made: Result = getattr(self, kind)(source)
        return made

    def check(self, *returned: Result) -> int:
        """Returns how often the last run has copied parts. Each run has its own values, the earlier ones' are gone."""
        text = calls_text(self.program.lines, returned)
        earlier: list[Tensor] = []
        copies = 0
        for run in range(RUNS):
            tensors = [changed(tensor, run) for tensor in self.program.tensors]
            wanted = self.program.results(tensors)
            before = calls_of("concat")
            results = ops.chain(tensors, text)
            copies = calls_of("concat") - before
            for result, each in zip(results, returned, strict=True):
                expected = wanted[each.number][each.part]
                assert (result.dtype, result.shape, result.stride()) == (
                    expected.dtype,
                    expected.shape,
                    expected.stride(),
                )
                assert torch.equal(result.nan_to_num(), expected.nan_to_num())
            for tensor in earlier:
                spoil(tensor)
            earlier = tensors
        return copies


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(40))
def test_any_images(seed: int, dtype: torch.dtype, torch_threads: None) -> None:
    torch.set_num_threads(1 + seed % 3)
    images = Images(seed, dtype)
    results = [images.add_any() for _ in range(images.draw.choice((4, 8, 16)))]
    images.check(results[-1])
    images.check(*images.draw.sample(results, images.draw.randint(1, len(results))))


def test_branches_are_written_where_they_are_joined() -> None:
    images = Images(0)
    source = Given(0)
    joined = images.join(*(images.conv(source, out, kernel) for out, kernel in ((8, 1), (24, 3), (5, 1))))
    last = images.conv(joined, 16)
    assert images.check(last) == 0
    assert images.check(joined) == 0  # which the caller gets
    assert images.check(last, Result(1)) == 1  # a part that the caller gets is an image by itself


@pytest.mark.parametrize("kind", ["depthwise", "norm", "pool", "upsample", "gated"])
def test_parts_of_every_kind_are_written_where_they_are_joined(kind: str) -> None:
    images = Images(6)
    parts = [getattr(images, kind)(Given(0)) for _ in range(3)]
    joined = images.join(*parts, images.conv(Given(0), 8))
    assert images.check(images.steps(joined)) == 0
    of_a_part = images.upsample(images.steps(parts[0]))
    assert images.check(images.conv(of_a_part, 8), joined) == 0


def test_features_joined_with_all_before() -> None:
    images = Images(1)
    features: Any = images.join(images.conv(Given(0), 16), images.conv(Given(0), 8))
    for _ in range(5):
        features = images.join(features, images.conv(images.norm(features), 12, 3))
    last = images.conv(images.norm(features), 16)
    assert images.check(last) == 0


def test_what_is_joined_twice_is_copied_once() -> None:
    images = Images(2)
    part = images.conv(Given(0), 8)
    first, second = images.join(part, images.conv(part, 8)), images.join(images.conv(part, 4), part)
    assert images.check(images.conv(first, 8, other=images.conv(second, 8))) == 1


@pytest.mark.parametrize("reader", ["view", "mean"])
def test_who_else_reads_a_part(reader: str) -> None:
    """Nobody gets a part whose rows have gaps that wants to see it otherwise."""
    images = Images(3)
    part = images.conv(Given(0), 8)
    if reader == "view":
        images.program.add("flatten", part, 2, -1)
        expected = 1
    else:
        images.program.add("adaptive_pool", part, "average", [1, 1])
        expected = 0
    other = Result(len(images.program.lines) - 1)
    joined = images.join(part, images.conv(Given(0), 8))
    assert images.check(images.conv(joined, 4), other) == expected


def test_along_another_dimension() -> None:
    images = Images(4)
    parts = [images.conv(Given(0), 8) for _ in range(2)]
    lines = Result(images.program.add("concat", tuple(parts), 2))
    assert images.check(lines) == 1


def test_of_what_is_copied_before_it_is_read() -> None:
    """A convolution that has to copy its input is not noted, and so is no part."""
    images = Images(5)
    images.program.tensors[0] = images.program.tensors[0].contiguous()
    inner = images.conv(images.depthwise(Given(0)), 8)
    joined = images.join(images.depthwise(Given(0)), inner)
    assert images.check(images.conv(joined, 4)) == 1
