"""torch.func and forward-mode derivatives of optimized models: torch's own functions do what they transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import xopt

Tensor = torch.Tensor

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 8), (4, 8)),
    "block": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)), (4, 8)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)), (2, 3, 8, 8)),
    "pool": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)), (2, 3, 8, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 4, 8)),
    "recurrent": (lambda: Outputs(nn.GRU(8, 8)), (3, 2, 8)),
}


class Outputs(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[0]


def by_jvp(model: Callable[..., Any], x: Tensor) -> Any:
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]


def by_dual_tensors(model: Callable[..., Any], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def by_vmap(model: Callable[..., Any], x: Tensor) -> Any:
    return torch.vmap(model)(x.unsqueeze(1))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about what it has no batching rules for
@pytest.mark.parametrize("transform", [by_jvp, by_dual_tensors, by_vmap])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_transformed_model_is_as_its_source(name: str, transform: Callable[..., Any], grad: bool) -> None:
    make, shape = MODELS[name]
    source = make().eval()
    optimized = xopt.optimize(source)
    x = torch.randn(shape)
    with torch.set_grad_enabled(grad):
        try:
            expected = transform(source, x)
        except (RuntimeError, NotImplementedError):
            pytest.skip("torch has no such rule for its own layer")
        optimized(x)  # programs are there
        got = transform(optimized, x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
