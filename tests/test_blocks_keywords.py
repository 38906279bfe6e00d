"""Functions of torch whose first arguments a forward gives by their names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.families import calls_of


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.first(x).chunk(3, -1))
        x = functional.scaled_dot_product_attention(query=query, key=key, value=value, is_causal=True)
        x = functional.gelu(input=self.second(x.transpose(1, 2).flatten(2)))
        x = functional.dropout(input=x, training=False)
        x = torch.where(condition=x > 0.3, input=x, other=torch.add(input=x, other=1.0))
        return torch.matmul(input=x, other=x.mT) + torch.sum(input=x, dim=-1, keepdim=True)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Named()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * 2.0  # type: ignore[no-any-return]


@torch.no_grad()
def test_they_are_found() -> None:
    torch.manual_seed(0)
    source = Twice().eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    before = {name: calls_of(name) for name in ("attention", "matmul")}
    for size in (7, 7, 9):
        x = torch.randn(2, size, 32)
        torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-4)
    assert all(calls_of(name) >= count + 3 for name, count in before.items())
    (whole,) = (fusion for fusion in xopt.report(optimized).fusions if not fusion.path)
    assert whole.problem is None
    assert {"attention", "linear+gelu_erf"} <= set(whole.fused)
