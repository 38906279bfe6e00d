"""Sizes of a chain's own results, and what forwards compute of them and expect of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.test_chain_programs import check, lengths_of_chains
from tests.test_optimize_conv import settled


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return lengths_of_chains(monkeypatch)


class OfLayers(nn.Module):
    """Something between two layers, whatever sizes the first one gives."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(16, 24), nn.Linear(24, 16), between

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.between(self.up(x).relu()))
        return result


def in_groups(x: Tensor) -> Tensor:
    """As many rows to a group as there are groups, or one fewer."""
    rows = x.shape[1]
    whole = rows - rows % 4
    x = x[:, :whole]
    return x.reshape(-1, (whole + 4) // 4 - 1, 4, x.shape[-1]).reshape(x.shape[0] * (whole // 4), 4, -1)


def from_the_middle(x: Tensor) -> Tensor:
    half = (x.shape[1] + 1) // 2
    return x[:, half - 1 : half + 1]


def negative(x: Tensor) -> Tensor:
    """What is left of a number below zero has the sign of the divisor, in Python."""
    x = x[:, : 3 + (1 - x.shape[1]) % 3]
    return x[:, (x.shape[1] - 9) // 4 :]


def grown(x: Tensor) -> Tensor:
    length = x.shape[1]
    length += 2
    length -= 3
    length *= 2
    return x[:, : length // 2]


def added_up(x: Tensor) -> Tensor:
    """As long a sum as a number in a chain can be."""
    return x[:, : sum([x.shape[1]] * 30) // 30]


def by_a_half(x: Tensor) -> Tensor:
    """Sizes are integers."""
    return x[:, : int(x.shape[1] * 0.5)]


def of_all(x: Tensor) -> Tensor:
    """So many elements are few."""
    return x if x.numel() * 2 < 2**31 else x[:1]


ARITHMETIC = {each.__name__: each for each in (in_groups, from_the_middle, negative, grown, added_up, of_all)}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str, chained: list[int]) -> None:
    source = settled(OfLayers(ARITHMETIC[name]))
    optimized = xopt.optimize(source)
    for rows in (8, 9, 10, 13, 8):
        check(source, optimized, torch.randn(3, rows, 16))
    assert len(chained) == 5
    assert min(chained) >= 2


def padded(x: Tensor) -> Tensor:
    missing = -x.shape[1] % 4
    if missing > 0:
        x = functional.pad(x, (0, 0, 0, missing))
    return x.reshape(-1, 4, x.shape[-1])


def halved(x: Tensor) -> Tensor:
    """By a fraction that is a whole number or not."""
    if x.shape[1] / 2 == x.shape[1] // 2:
        x = x[:, : x.shape[1] // 2]
    return x if x.shape[1] ** 0.5 > 3 else x * 2.0


BRANCHES = {each.__name__: each for each in (padded, halved, by_a_half)}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches(name: str) -> None:
    """Each of these has a program of its own, and no call of the wrong one gets anywhere."""
    source = settled(OfLayers(BRANCHES[name]))
    optimized = xopt.optimize(source)
    for rows in (8, 9, 12, 13, 4, 8, 20, 9):
        for batch in (1, 3):
            check(source, optimized, torch.randn(batch, rows, 16))


def test_nothing_runs_for_other_sizes(chained: list[int]) -> None:
    source = settled(OfLayers(halved))
    optimized = xopt.optimize(source)
    for rows in (10, 11):
        check(source, optimized, torch.randn(2, rows, 16))
    chained.clear()
    for rows in (11, 10, 13, 12, 11):
        check(source, optimized, torch.randn(2, rows, 16))
    assert chained == [2, 4, 2, 4, 2]


class Repeated(nn.Module):
    """A size that each layer computes from the one before's, twice as long a story each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        for layer in self.layers:
            length = (length + length) // 2
            x = layer(x)[:, :length].relu()
        return x


def test_long_stories_are_no_sizes(chained: list[int]) -> None:
    source = settled(Repeated())
    optimized = xopt.optimize(source)
    for rows in (8, 5):
        check(source, optimized, torch.randn(2, rows, 16))
