"""xopt::conv where vector blocks read rows out of the image, or of a copy with zeros around it: lines of as many
outputs as a block has rows, and of half as many, kernels that reach over every border, images amid poison."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests import cases, test_conv
from tests.conv_cases import LAYOUTS, VALUES, is_too_much, joined, sample_operands
from tests.families import Family, active_level
from tests.test_conv import ConvCase, output_size
from xopt import tuning

AUTOMATIC, PATCHES = range(2)  # csrc/runtime/tuning.h's TunedPath

# Outputs of a line: some blocks of 12 to 14 rows, or of 5 and 6 on AVX2; half of one; blocks that differ by a row; and
# what is not enough for those.
WIDTHS = (5, 6, 7, 10, 12, 12, 13, 14, 14, 14, 24, 26, 28, 28, 3, 7, 7, 8, 16, 20, 37, 53, 64)


def sample_geometry(rng: random.Random) -> dict[str, Any]:
    kernel = [rng.choice((1, 2, 3, 3, 3, 5)) for _ in range(2)]
    stride = [rng.choice((1, 1, 1, 2, 3)) for _ in range(2)]
    dilation = [rng.choice((1, 1, 1, 1, 2)) for _ in range(2)]
    padding = [rng.choice((0, 1, 1, 1, 2)) for _ in range(4)]
    outputs = [rng.choice((1, 2, 3, 5)), rng.choice(WIDTHS)]
    rest = [rng.randrange(step) for step in stride]  # pixels behind the last that is read
    size = [
        max(1, (outputs[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 + rest[i] - sum(padding[2 * i :][:2]))
        for i in range(2)
    ]
    channels, out_channels = rng.choice((16, 32, 32, 48, 64, 20, 3)), rng.choice((1, 5, 16, 33, 40))
    groups = rng.choice((1, 1, 1, 2))
    if rng.random() < 0.3:  # several in a product, which have columns to themselves
        channels = out_channels = rng.choice((2, 4, 8, 8, 16, 16))
        groups = rng.choice((1, 2, 2, 4, 3)) * 16 // channels
    return {
        "images": rng.choice((1, 1, 2, 3)),
        "size": joined(size),
        "channels": channels,
        "out_channels": out_channels,
        "groups": groups,
        "kernel": joined(kernel),
        "stride": joined(stride),
        "dilation": joined(dilation),
        "padding": joined(padding),
    }


def sample_small_geometry(rng: random.Random) -> dict[str, Any]:
    while True:
        case = ConvCase(**(geometry := sample_geometry(rng)))
        if min(outputs := output_size(case)) >= 1 and not is_too_much(case, outputs):
            return geometry


def sample_wide_geometry(rng: random.Random) -> dict[str, Any]:
    """Of lines that go strip by strip, since L2 does not hold some of them, or that are copied, two lines at a time."""
    kernel = rng.choice((1, 3, 3, 5))
    return {
        "size": joined([kernel + rng.choice((0, 1, 3)), rng.choice((1031, 1200))]),
        "channels": rng.choice((64, 64, 60)),
        "out_channels": rng.choice((2, 16, 33)),
        "kernel": joined([kernel, rng.choice((1, 3, 3))]),
        "stride": joined([1, rng.choice((1, 1, 2))]),
        "dilation": joined([1, rng.choice((1, 1, 2))]),
        "padding": joined([rng.choice((0, 1, 1)) for _ in range(4)]),
    }


def sample(rng: random.Random) -> ConvCase:
    geometry = sample_wide_geometry(rng) if rng.random() < 0.03 else sample_small_geometry(rng)
    packed = rng.choice(cases.FLOATS)
    fields = sample_operands(rng, packed, cases.pick(rng, VALUES), rng.choice(("normal", "integers")))
    if rng.random() < 0.7:  # what is simple enough to be finished in a block's registers, and read as it is
        fields |= {"input": packed, "out": packed, "activation": rng.choice(("none", "relu"))}
        if fields.get("binary") == "add":
            fields["other"] = packed
    fields["layout"] = cases.pick(rng, LAYOUTS | {"contiguous": 5})
    return ConvCase(**geometry, **fields)


def check(case: ConvCase) -> None:
    """Right, and the same bits as with patches: bands of an image, which may be read otherwise than the whole, so do
    not depend on how many there are."""
    test_conv.check(case)
    operands, results = test_conv.operands_of(case), []
    for path in (AUTOMATIC, PATCHES):
        with tuning.forced([-1, 0, 0, 0, 0, path]):
            results.append(test_conv.convolve(case, operands))
    are_tiles = active_level() == "amx" and case.packed == "bf16"
    are_narrow_groups = case.groups > 1 and case.channels < 16 and case.packed != "f16"
    if not (are_tiles or are_narrow_groups):  # which have an order of their own
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


FAMILY = Family("conv_image", ConvCase, sample, check)


def test_cases(case_batch: list[ConvCase]) -> None:
    FAMILY.run_all(case_batch)
