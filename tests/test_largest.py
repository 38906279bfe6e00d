"""The largest and the smallest along a dimension, without their places where nobody asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt

WAYS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "by its name": (lambda x: x.max(dim=2).values, True),
    "by its place": (lambda x: torch.max(x, 1, True)[0], True),
    "the smallest": (lambda x: x.min(-1)[0], True),
    "all by names": (lambda x: torch.min(input=x, dim=0, keepdim=True)[0], True),
    "with places": (lambda x: torch.add(*x.max(2)), False),
    "places": (lambda x: x.max(2).indices, False),
    "of all": (lambda x: x.max(), False),
    "of two": (lambda x: torch.max(x, -x), False),
}


class Model(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.way = nn.Linear(6, 8), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.linear(x).relu()) * 1.5


@pytest.mark.parametrize("name", WAYS)
@torch.no_grad()
def test_the_largest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, is_alone = WAYS[name]
    source = Model(way).eval()
    model = xopt.optimize(source, dtype=torch.float32)
    for batch in (2, 3, 1):
        x = torch.randn(batch, 5, 4, 6)
        torch.testing.assert_close(model(x), source(x), rtol=1e-5, atol=1e-6)
        x[0, 0] = torch.nan
        torch.testing.assert_close(model(x), source(x), rtol=1e-5, atol=1e-6, equal_nan=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as taken:
        model(x)
    names: Any = {event.key for event in taken.key_averages()}
    assert bool(names & {"aten::amax", "aten::amin"}) == is_alone
