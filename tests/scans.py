"""What scans over time give, compared with float64: errors add up over steps and rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
_ROUNDING = {"f32": 2.0**-23, "bf16": 2.0**-8, "f16": 2.0**-10}


class Expected(NamedTuple):
    value: Tensor
    size: Tensor
    """Of what was added up for it."""


def expect_close(what: str, got: Tensor, expected: Expected, dtype: str) -> None:
    value = expected.value
    assert got.shape == value.shape, (what, got.shape, value.shape)
    bound = 1e-5 * expected.size + _ROUNDING[dtype] * value.abs() + 1e-30
    bound = bound + (2.0**-24 if dtype == "f16" else 0)  # the smallest that it has
    wrong = (got.double() - value).abs() / bound
    assert bool((wrong <= 1).all()), f"{what}: {float(wrong.max()):.3g} times the bound"


def expect_same_with_any_threads(run: Callable[[], Any]) -> None:
    """To the last bit. For tests with the fixture `torch_threads`."""
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append(run())
    for out, last in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(last, results[0][1])
