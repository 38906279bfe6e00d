"""Models that hold matrices themselves and multiply by them: packed, and of the very class that they were."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from xopt.modules.block import PROGRAMS
from xopt.modules.packed_parameter import PackedParameter

WIDTH = 64


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.projection = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), self.linear(x)], dim=1)
        return (tokens @ self.projection) * self.factor


def made() -> Any:
    torch.manual_seed(0)
    return Projected().eval()


def close(model: nn.Module, source: nn.Module) -> None:
    for length in (5, 5, 3):
        x = torch.randn(2, length, WIDTH)
        with torch.no_grad():
            got, expected = model(x), source(x)
        assert got.dtype == expected.dtype
        assert (got - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_class_and_packed_weight(dtype: torch.dtype) -> None:
    source = made()
    optimized = xopt.optimize(source, dtype=dtype)
    copies = copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))
    for model in (optimized, *copies):
        assert type(model) is Projected
        assert type(model.projection) is PackedParameter
        close(model, source)
        assert vars(model)[PROGRAMS].fused
    optimized.projection.data.zero_()
    for model in copies:  # which have weights of their own
        close(model, source)


def test_states_and_moves_are_what_they_would_be(tmp_path: Path) -> None:
    source, other = made(), Projected().eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    state = optimized.state_dict()
    assert state.keys() == source.state_dict().keys()
    assert all(type(value) is Tensor for value in state.values())
    assert torch.equal(state["projection"], source.projection.detach().bfloat16())
    whole = nn.Sequential(optimized)
    assert torch.equal(whole.state_dict()["0.projection"], state["projection"])
    optimized.load_state_dict(other.state_dict())
    close(optimized, other)
    xopt.save(optimized, tmp_path)
    close(xopt.load(tmp_path, Projected), other)
    for moved in (copy.deepcopy(optimized).float(), nn.Sequential(copy.deepcopy(optimized)).float()[0]):
        assert type(moved) is Projected
        assert type(moved.projection) is PackedParameter
        assert moved.projection.dtype == torch.float32
        close(moved, other)
    assert optimized.to("cpu") is optimized


def test_it_keeps_nothing_alive() -> None:
    optimized = xopt.optimize(made(), dtype=torch.bfloat16)
    close(optimized, made())
    optimized.float().state_dict()
    there = weakref.ref(optimized), weakref.ref(optimized.linear)
    gc.collect()  # what recordings leave
    gc.disable()
    try:
        del optimized
        assert [each() for each in there] == [None, None]
    finally:
        gc.enable()
