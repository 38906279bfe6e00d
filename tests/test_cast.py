"""The dtype of what a model returns: written by the last step, and the source's whatever else is on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from xopt.graph.autocast import autocast

torch.manual_seed(0)
X = torch.randn(5, 24)


class Heads(nn.Module):
    """A result of a product, one of a norm, one that another layer takes as well, and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.norm = nn.LayerNorm(40)
        self.last = nn.Linear(40, 9)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x).relu()
        return {"logits": self.last(hidden), "others": (hidden, [self.norm(hidden)]), "input": x, "none": None}


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.up = nn.ConvTranspose2d(8, 5, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.stem(x), self.up(self.stem(x))


class Stops(nn.Module):
    """A forward that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError(str(self.first(x).dtype))


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    items = result.values() if isinstance(result, dict) else result
    return [tensor for item in items or () for tensor in tensors(item)]


def autocast_state() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_result_is_rounded_once(dtype: torch.dtype) -> None:
    source = Heads().eval()
    optimized = xopt.optimize(source, dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):
        rounded = optimized(X)
    for _ in range(3):
        result = optimized(X)
        assert {each.dtype for each in tensors(result)} == {torch.float32}
        logits, rounded_logits = result["logits"], rounded["logits"]
        assert rounded_logits.dtype == dtype
        assert not torch.equal(logits, logits.to(dtype).float()), "it was rounded to the dtype inside"
        torch.testing.assert_close(logits.to(dtype), rounded_logits, rtol=0.01, atol=0.01)
        assert torch.equal(result["input"], X)
        torch.testing.assert_close(logits, source(X)["logits"], rtol=0.05, atol=0.05)


@torch.no_grad()
def test_with_and_without_autocast_in_turns() -> None:
    source = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 9)).eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    for _ in range(3):
        plain = optimized(X)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = optimized(X)
        assert (plain.dtype, inside.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(plain.bfloat16(), inside)


@torch.no_grad()
def test_images() -> None:
    source = Image().eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    image = torch.randn(2, 3, 11, 9)
    for _ in range(2):
        for result, expected in zip(optimized(image), source(image), strict=True):
            assert result.dtype == torch.float32
            assert result.stride() == expected.stride()
            torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_a_cast_inside_a_block_is_written_by_the_step_before() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(24, 40)

        def forward(self, x: Tensor) -> Tensor:
            wide: Tensor = self.first(x).tanh().float() * 3
            return wide

    model = nn.Sequential(Wide(), nn.Linear(40, 9)).eval()
    optimized = xopt.optimize(model, dtype=torch.bfloat16)
    torch.testing.assert_close(optimized(X), model(X), rtol=0.05, atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = optimized[0](X)
    assert wide.dtype == torch.float32
    assert not torch.equal(wide / 3, (wide / 3).bfloat16().float())


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float32}, {"dtype": torch.float32, "memory_format": torch.contiguous_format}]
)
@torch.no_grad()
def test_a_cast_that_says_more_than_a_dtype_stays(options: dict[str, Any]) -> None:
    class Laid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            image: Tensor = self.stem(x).relu()
            return image.to(**options) * image.size(1)

    source = Laid().eval()
    image = torch.randn(2, 3, 9, 11).contiguous(memory_format=torch.channels_last)
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            result, expected = optimized(image), source(image)
            assert result.dtype == torch.float32
            assert result.stride() == expected.stride()
            torch.testing.assert_close(result, expected, rtol=0.05, atol=0.1)
    assert torch.equal(result / 8, (result / 8).bfloat16().float()) == ("memory_format" in options)


def test_autocast_is_as_it_was_also_after_an_error() -> None:
    optimized = xopt.optimize(Stops().eval(), dtype=torch.bfloat16)
    before = autocast_state()
    for _ in range(2):
        with torch.no_grad(), pytest.raises(KeyError, match="bfloat16"):
            optimized(X)
        assert autocast_state() == before
    with torch.autocast("cpu", dtype=torch.float16):
        outer = autocast_state()
        with autocast("cpu", torch.bfloat16):
            assert autocast_state() == (True, torch.bfloat16, True)
        assert autocast_state() == outer
    assert autocast_state() == before


@pytest.mark.parametrize("switch", [True, False])
@torch.no_grad()
def test_switched_off_the_result_is_the_sources_dtype_too(switch: bool) -> None:
    config = xopt.Config(fuse_linear=switch)
    optimized = xopt.optimize(Heads().eval(), dtype=torch.bfloat16, config=config)
    logits = optimized(X)["logits"]
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float()) == (not switch)


@torch.no_grad()
def test_copies_have_programs_of_their_own() -> None:
    optimized = xopt.optimize(Heads().eval(), dtype=torch.bfloat16)
    expected = optimized(X)["logits"]
    assert torch.equal(copy.deepcopy(optimized)(X)["logits"], expected)
