"""Functions with a derivative of their own (`torch.autograd.Function`) in a recorded forward: what they compute is
recorded, and gradients are theirs, as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.block_models import Mlp, X


class Swish(torch.autograd.Function):
    """As EfficientNets have it to save memory, with a derivative that is not the function's, which tells them apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3 * torch.sigmoid(ctx.saved_tensors[0])


class Separate(torch.autograd.Function):
    """With its context set up apart, a default, and more than one result."""

    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]:
        return functional.gelu(x), x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        return first + ctx.factor * second, None


def separate(x: Tensor) -> Tensor:
    first, second = Separate.apply(x)
    return first + second  # type: ignore[no-any-return]


@pytest.mark.parametrize(("function", "fused"), [(Swish.apply, "linear+silu"), (separate, "gelu_erf+mul+add")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_it_computes_is_fused_and_its_gradients_are_its_own(function: Any, fused: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = nn.Sequential(Mlp(function)).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    exactness = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    with torch.no_grad():
        for x in (X, X[:1], X + 1):
            torch.testing.assert_close(optimized(x), source(x), atol=exactness, rtol=exactness)
    assert any(fused in fusion.fused for fusion in xopt.report(optimized).fusions if fusion.path == "")
    gradients = []
    for model in (optimized, source):
        x = X.clone().requires_grad_()
        gradients.append(torch.autograd.grad(model(x).sum(), x)[0])
    torch.testing.assert_close(*gradients, atol=exactness, rtol=exactness)
