"""Forwards that multiply by a layer's weight, or by a parameter, themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.test_optimize_matmul import flop_by_op

WIDTH = 48

WAYS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "linear": lambda x, layer: functional.linear(x, layer.weight),
    "linear with bias": lambda x, layer: functional.linear(input=x, weight=layer.weight, bias=layer.bias),
    "T": lambda x, layer: x @ layer.weight.T,
    "mT": lambda x, layer: torch.matmul(x, layer.weight.mT),
    "t": lambda x, layer: x.matmul(layer.weight.t()) + layer.bias,
    "transpose": lambda x, layer: torch.matmul(x, torch.transpose(layer.weight, 0, 1)),
}


class Multiplies(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 40)
        self.way = WAYS[way]

    def forward(self, x: Tensor) -> Tensor:
        return self.way(torch.relu(self.first(x)), self.second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_packed_weight_is_used_as_it_lies(way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, other = Multiplies(way).eval(), Multiplies(way).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for model in (source, other):
        optimized.load_state_dict(model.state_dict())
        for rows in (5, 1, 7):
            x = torch.randn(2, rows, WIDTH)
            torch.testing.assert_close(optimized(x), model(x), atol=tolerance, rtol=tolerance)
    assert flop_by_op(optimized, torch.randn(2, 3, WIDTH)).keys() == {"xopt.linear"}
    assert xopt.report(optimized).fusions[0].fused == ("linear+relu", "linear")
    optimized.second.weight = nn.Parameter(torch.ones(40, WIDTH), requires_grad=False)
    source.second.weight = nn.Parameter(torch.ones(40, WIDTH))
    source.first.load_state_dict(other.first.state_dict())
    source.second.bias.copy_(other.second.bias)
    torch.testing.assert_close(optimized(x), source(x), atol=0.3, rtol=tolerance)


@torch.no_grad()
def test_a_parameter_transposed_does_not_keep_a_forward_from_being_recorded() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.first(x)) @ self.weight.T

    torch.manual_seed(0)
    source, x = Own().eval(), torch.randn(2, 5, WIDTH)
    optimized = xopt.optimize(source, dtype=torch.float32)
    torch.testing.assert_close(optimized(x), source(x), atol=1e-4, rtol=1e-4)
    assert "linear+relu" in xopt.report(optimized).fusions[0].fused


def test_gradients_of_inputs() -> None:
    torch.manual_seed(0)
    source = Multiplies("T").eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    inputs = [torch.ones(3, WIDTH, requires_grad=True) for _ in range(2)]
    for model, x in zip((source, optimized), inputs, strict=True):
        model(x).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-3, rtol=1e-3)
