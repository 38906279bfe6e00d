"""Models that were optimized to another dtype, entered by methods that are not their forward."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt

WIDTH = 64
INPUT = torch.linspace(-2, 2, 2 * 5 * WIDTH).sin().reshape(2, 5, WIDTH)


class ByAttention(nn.Module):
    """As images' features are often pooled: the query is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(self.probe.repeat(x.shape[0], 1, 1), x, x)[0]
        return attended


class ByProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(2, 4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul((self.probe * 0.5).softmax(-1), x.transpose(1, 2))


class Tower(nn.Module):
    def __init__(self, head: nn.Module, *, recorded: bool) -> None:
        super().__init__()
        self.recorded = recorded
        self.patches = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.recorded and float(x.sum()) > 1e9:
            raise ValueError("expected smaller values")
        x = self.patches(x.to(self.patches.weight.dtype))
        return self.head(x), {"states": self.norm(x)}


class Model(nn.Module):
    def __init__(self, head: nn.Module, *, recorded: bool) -> None:
        super().__init__()
        self.tower = Tower(head, recorded=recorded)
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.tower(x)[1]["states"])

    def features(self, x: Tensor) -> Any:
        return self.tower(x)


def error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize("head", [ByAttention, ByProduct])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_method_answers_as_the_forward_does(head: type[nn.Module], recorded: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = Model(head(), recorded=recorded).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    pooled, others = source.features(INPUT)
    for model in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        for _ in range(3):
            got, got_others = model.features(INPUT)
            assert got.dtype == got_others["states"].dtype == torch.float32
            assert error(got, pooled) < 2e-2
            assert error(got_others["states"], others["states"]) < 2e-2
            assert error(model(INPUT), source(INPUT)) < 2e-2
    assert not torch.is_autocast_enabled("cpu")


@torch.no_grad()
def test_what_the_user_says_of_autocast_holds() -> None:
    optimized = xopt.optimize(Model(ByProduct(), recorded=True).eval(), dtype=torch.bfloat16)
    with torch.autocast("cpu", enabled=False):
        assert optimized.tower.norm(INPUT).dtype == torch.float32
        with pytest.raises(RuntimeError, match="dtype"):
            optimized.features(INPUT)
    with torch.autocast("cpu", torch.bfloat16):
        assert optimized.features(INPUT)[0].dtype == torch.bfloat16


@torch.no_grad()
def test_parts_of_a_forward_without_autocast_stay_so() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x.dtype)
            self.seen.append((x @ x.transpose(-1, -2)).dtype)
            result: Tensor = self.linear(x)
            return result

    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.part = Part()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                result: Tensor = self.part(x.float())
            return result

    optimized: Any = xopt.optimize(Exact().eval(), dtype=torch.bfloat16)
    for _ in range(3):
        optimized.part.seen.clear()
        optimized(INPUT)
        assert set(optimized.part.seen) == {torch.float32}
    optimized.part.seen.clear()
    optimized.part(INPUT)
    assert optimized.part.seen == [torch.float32, torch.bfloat16]
