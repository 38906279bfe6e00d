"""Profiles on a real CUDA device: categories, bandwidth and busy share of a compiled model, against torch's profiler.

Skipped where there is none; tests/test_profile_devices.py covers the same with events that are made up. `pytest -s`
prints the profile.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

import xopt
from xopt.profiling import Profile
from xopt.profiling.result import Device, Kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: torch sees no CUDA device")

STEPS = 10
ROWS, FEATURES, WIDE = 8192, 1024, 4096


class Mixed(nn.Module):
    """Something of each category, large enough to be timed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.up, self.down = nn.Linear(FEATURES, WIDE), nn.Linear(WIDE, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)

    def forward(self, image: torch.Tensor, rows: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pixels = torch.relu(self.conv(image)) * 2
        rows = self.norm(rows + self.down(nn.functional.gelu(self.up(rows))))
        return pixels, rows, wide.float().sum(1), torch.sigmoid(wide) * wide


@functools.cache
def compiled() -> tuple[Any, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = Mixed().eval().to("cuda", torch.bfloat16)
    shapes = (32, 64, 56, 56), (ROWS, FEATURES), (512, 65536)
    inputs = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return torch.compile(model), inputs


@functools.cache
def profiled() -> Profile:
    model, inputs = compiled()
    taken = xopt.profile(model, *inputs, steps=STEPS, warmup=5)
    print(taken)
    return taken


def device() -> Device:
    return profiled().devices["cuda:0"]


def largest(category: str) -> Kernel:
    return next(kernel for kernel in device().kernels if kernel.category == category)


def test_kernels_have_categories() -> None:
    assert {"pointwise", "reduction", "persistent reduction", "gemm", "conv"} <= set(device().categories)
    assert sum(entry.seconds for entry in device().categories.values()) == pytest.approx(device().kernel_seconds)
    assert "other" not in device().categories, [row.name for row in device().kernels if row.category == "other"]


def test_the_device_is_busy_for_a_share_of_the_time() -> None:
    share = profiled().device_busy_share("cuda:0")
    assert share is not None
    assert 0 < share <= 1
    assert 0 < device().busy_seconds <= device().kernel_seconds * 1.0001
    assert device().busy_seconds <= profiled().wall_seconds


def test_products_have_their_operations_and_a_share_of_the_measured_peak() -> None:
    products = [kernel for kernel in device().kernels if kernel.category == "gemm" and kernel.flop]
    assert sum(kernel.flop * kernel.calls for kernel in products) == STEPS * 2 * 2 * ROWS * FEATURES * WIDE
    product = products[0]
    assert product.dtype == "bf16"
    assert product.bound == "compute"
    assert product.share_of_roof is not None
    assert product.share_of_roof == pytest.approx(product.flop_per_second / device().roofs["bf16"])
    assert 0.1 < product.share_of_roof < 1.5
    conv = largest("conv")
    assert conv.flop == 2 * 32 * 56 * 56 * 64 * 64 * 9


@pytest.mark.parametrize("category", ["pointwise", "reduction", "persistent reduction"])
def test_loops_have_their_bandwidth_and_a_share_of_the_measured_one(category: str) -> None:
    kernel = largest(category)
    assert kernel.bytes
    assert kernel.bound == "memory"
    assert kernel.share_of_roof == pytest.approx(kernel.bytes_per_second / device().roofs["copy"])
    assert kernel.share_of_roof is not None
    assert 0.1 < kernel.share_of_roof < 4  # above 1, data came from the cache


def test_bytes_are_those_of_inputs_and_outputs() -> None:
    wide = 512 * 65536 * 2
    reductions = [kernel.bytes for kernel in device().kernels if kernel.category == "reduction"]
    loops = [kernel.bytes for kernel in device().kernels if kernel.category == "pointwise"]
    assert any(wide <= moved <= wide * 1.01 for moved in reductions) or any(
        2 * wide <= moved <= 2 * wide * 1.01
        for moved in reductions  # fused with the sigmoid
    ), reductions
    assert any(2 * wide <= moved <= 2 * wide * 1.01 for moved in [*loops, *reductions]), loops


def torchs_own(steps: int) -> float:
    """Seconds of all kernels."""
    model, inputs = compiled()
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.inference_mode(), torch.profiler.profile(activities=both) as recorded:
        for _ in range(steps):
            model(*inputs)
        torch.cuda.synchronize()
    averages: Any = recorded.key_averages()
    kernels = [each for each in averages if str(each.device_type).endswith("CUDA") and not each.is_user_annotation]
    assert kernels
    return float(sum(each.self_device_time_total for each in kernels)) / 1e6


def test_times_agree_with_torchs_own_profiler() -> None:
    model, inputs = compiled()
    profiled()
    ours, theirs = [], []
    for _ in range(3):
        ours.append(xopt.profile(model, *inputs, steps=STEPS, warmup=1, roofs=False).devices["cuda:0"].kernel_seconds)
        theirs.append(torchs_own(STEPS))
    print("kernels' seconds, ours and torch's:", ours, theirs)
    assert statistics.median(ours) == pytest.approx(statistics.median(theirs), rel=0.03)


def test_an_eager_model_is_profiled_as_well() -> None:
    model = Mixed().eval().to("cuda", torch.bfloat16)
    taken = xopt.profile(model, *compiled()[1], steps=2, warmup=2, roofs=False)
    kernels = taken.devices["cuda:0"].kernels
    assert any(kernel.category == "gemm" and kernel.module == "up" for kernel in kernels), [
        (kernel.name, kernel.module) for kernel in kernels
    ]
    assert sum(entry.seconds for entry in taken.categories.values()) == pytest.approx(taken.wall_seconds, rel=0.02)


def test_the_profile_goes_to_json_and_back() -> None:
    assert Profile.from_json(profiled().to_json()) == profiled()
    assert "cuda:0" in str(profiled())
