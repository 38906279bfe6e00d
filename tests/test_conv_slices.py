"""xopt::conv and xopt::qconv where the k of their patches goes by slices, with tiles: so it does to small images under
a stride, with weights as large as no family of cases has them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests import test_conv, test_qconv
from tests.families import Family, expect_equal
from tests.test_conv import INTEGERS, ConvCase, conv
from xopt import tuning

ALWAYS_SLICES = [-1, 0, 0, 0, 1, 0]  # TunedStay::never of csrc/runtime/tuning.h


def check(case: ConvCase) -> None:
    with tuning.forced(ALWAYS_SLICES):
        test_conv.check(case)


FAMILY = Family("conv_slices", ConvCase, test_conv.sample, check)


def test_cases(case_batch: list[ConvCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
def test_bad_geometries() -> None:
    """Several slices, blocks that end within a tile, kernels larger than the image, steps that leave pixels out."""
    FAMILY.run_all(
        ConvCase(
            seed=seed, images=images, channels=channels, out_channels=out_channels, size=size, kernel=kernel,
            stride=stride, padding=padding, packed="bf16", input=dtype, weight="bf16", **INTEGERS,  # type: ignore[arg-type]
        )
        for seed, (images, channels, out_channels, size, kernel, stride, padding) in enumerate([
            (1, 64, 33, "8x8", "3x3", "1x1", "1x1x1x1"),
            (2, 120, 40, "7x7", "3x3", "1x1", "1x1x1x1"),
            (3, 61, 64, "5x6", "3x3", "2x2", "1x1x1x1"),
            (1, 300, 70, "2x3", "5x4", "1x1", "2x2x2x1"),
            (1, 40, 100, "1x1", "3x3", "1x1", "1x1x1x1"),
            (0, 64, 32, "8x8", "3x3", "1x1", "1x1x1x1"),
        ])
        for dtype in ("bf16", "f32")
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_int8(seed: int) -> None:
    """Whose padding is the zero point, and whose rows are summed up on their way in."""
    with tuning.forced(ALWAYS_SLICES):
        test_qconv.FAMILY.run(test_qconv.sample(random.Random(seed)))


@pytest.mark.parametrize(("channels", "side", "stride"), [(768, 14, 2), (1024, 16, 2), (1024, 8, 1)])
def test_small_images_under_large_weights(torch_threads: None, channels: int, side: int, stride: int) -> None:
    torch.manual_seed(channels)
    weight = torch.randn(channels, channels, 3, 3).bfloat16()
    x = torch.randn(3, channels, side, side).bfloat16().contiguous(memory_format=torch.channels_last)

    def convolve(images: Tensor) -> Tensor:
        return conv(images, weight, padding=[1] * 4, stride=[stride] * 2)

    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(convolve(x))
        expect_equal(f"{threads} threads", results[-1], results[0])
    expect_equal("images one by one", torch.cat([convolve(image) for image in x.split(1)]), results[0])
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1, stride=stride)
    torch.testing.assert_close(results[0].double(), exact, rtol=2**-7, atol=1e-2 * float(exact.std()))
