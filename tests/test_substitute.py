"""Functions that are substituted in forwards which cannot be recorded: where it is worth what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import xopt


def watchers() -> int:
    return len(_get_current_function_mode_stack())


class Scan(nn.Module):
    """Step by step over time, as recurrent layers that somebody writes out. It ends with one product."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.decay = nn.Parameter(torch.full((24,), 0.9))
        self.out = nn.Linear(24, 24)
        self.watchers: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert float(x.detach().abs().sum()) < 1e30  # no recording knows that
        self.watchers.append(watchers())
        state = torch.zeros_like(x[0])
        for step in range(self.steps):
            state = state * self.decay + x[step % len(x)]
        return torch.matmul(x + state, self.out.weight.t())


class Around(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.scan, self.head = Scan(steps), nn.Linear(24, 8)
        self.before: list[int] = []
        self.after: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert float(x.detach().abs().sum()) < 1e30
        self.before.append(watchers())
        x = torch.matmul(x, x.transpose(1, 2)).softmax(-1) @ x
        x = self.scan(x)
        self.after.append(watchers())
        return torch.matmul(x, self.head.weight.t())


def test_a_forward_of_many_steps_runs_unwatched_and_the_one_around_it_does_not() -> None:
    source = Around(400).eval()
    optimized = xopt.optimize(source)
    x = torch.randn(16, 8, 24)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)
    assert optimized.scan.watchers == [1, 0, 0]
    assert optimized.before == optimized.after == [1, 1, 1]


def test_a_forward_of_few_steps_is_watched() -> None:
    source = Around(4).eval()
    optimized = xopt.optimize(source)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(16, 8, 24)
            torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)
    assert optimized.scan.watchers == [1, 1, 1]


def test_nothing_watches_after_a_forward_that_raises() -> None:
    optimized = xopt.optimize(Around(400).eval())
    with torch.no_grad():
        for _ in range(2):
            optimized(torch.randn(16, 8, 24))
        for _ in range(2):
            with pytest.raises(RuntimeError):
                optimized(torch.randn(16, 8, 23))
        assert watchers() == 0
        optimized(torch.randn(16, 8, 24))
    assert optimized.scan.watchers[-1] == 0
    assert optimized.after[-1] == 1
