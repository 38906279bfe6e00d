"""A BatchNorm after a linear layer: done with its sums, and every parameter stays where it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt


def network(bias: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(20, 70, bias=bias), nn.BatchNorm1d(70), nn.ReLU()),
        *(nn.Linear(70, 33), nn.BatchNorm1d(33, affine=False), nn.GELU(), nn.Linear(33, 7)),
    )
    for layer in model:
        module: Any = layer
        if isinstance(layer, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.2, 2.0)
            if module.affine:
                nn.init.normal_(module.weight)
                module.weight.data[3] = 0.0
                nn.init.normal_(module.bias)
    return model.eval()


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_done_with_the_sums(dtype: torch.dtype, bias: bool) -> None:
    source = network(bias)
    x = torch.randn(9, 20)
    optimized = xopt.optimize(source, dtype=dtype, sample_input=x)
    exact = copy.deepcopy(source).double()(x.double()).detach()
    theirs = copy.deepcopy(source).to(dtype)(x.to(dtype)).detach()
    with torch.no_grad():
        for _ in range(2):
            assert relative_error(optimized(x), exact) <= 1.1 * relative_error(theirs, exact) + 1e-6
    (fusion,) = xopt.report(optimized).fusions
    assert list(fusion.fused) == ["linear+batch_norm+relu", "linear+batch_norm+gelu_erf"]
    state = optimized.state_dict()
    for name, value in source.state_dict().items():
        assert torch.equal(state[name], value.to(state[name].dtype))


def test_sees_new_statistics() -> None:
    source = network()
    x = torch.randn(9, 20)
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=x)
    with torch.no_grad():
        for model in (source, optimized):
            model[1].running_mean.add_(1.0)
            model[1].weight.mul_(2.0)
        torch.testing.assert_close(optimized(x), source(x))


class Tokens(nn.Module):
    """As LeViT has it: a norm that sees the tokens of all images as rows."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.linear, self.written = nn.Linear(20, 70, bias=False), written
        norm: Any = nn.BatchNorm1d(70)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.2, 2.0)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.linear(x)
        if self.written == "reshape_as":
            rows = self.norm(tokens.flatten(0, 1)).reshape_as(tokens)
        elif self.written == "view":
            rows = self.norm(tokens.view(-1, 70)).view(x.shape[0], x.shape[1], 70)
        elif self.written == "other rows":
            rows = self.norm(tokens.transpose(0, 1).reshape(-1, 70)).view(x.shape[1], x.shape[0], 70)
        else:  # two readers
            rows = self.norm(tokens.flatten(0, 1)).view_as(tokens) + tokens
        return nn.functional.hardswish(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("written", ["reshape_as", "view", "other rows", "read twice"])
def test_tokens_as_rows(written: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = Tokens(written).eval()
    optimized = xopt.optimize(source, dtype=dtype, sample_input=torch.randn(2, 9, 20))
    exact, theirs = copy.deepcopy(source).double(), copy.deepcopy(source).to(dtype)
    with torch.no_grad():
        for x in (torch.randn(2, 9, 20), torch.randn(3, 5, 20)):
            expected = exact(x.double())
            assert optimized(x).shape == expected.shape
            assert relative_error(optimized(x), expected) <= 1.1 * relative_error(theirs(x.to(dtype)), expected) + 1e-6
    x = torch.randn(2, 9, 20, requires_grad=True)
    (input_gradient,) = torch.autograd.grad(optimized(x).sum(), x)
    torch.testing.assert_close(input_gradient, torch.autograd.grad(source(x).sum(), x)[0], rtol=0.05, atol=0.05)
    fused = [step for fusion in xopt.report(optimized).fusions for step in fusion.fused]
    assert ("linear+batch_norm+hardswish" in fused) == (written in ("reshape_as", "view"))


def test_three_dimensions_and_the_switch() -> None:
    """BatchNorm1d takes the middle dimension of three for the channels, which is not the linear layer's last."""
    torch.manual_seed(0)
    source: Any = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)).eval()
    nn.init.normal_(source[1].running_mean)
    optimized = xopt.optimize(source, dtype=torch.float32)
    off = xopt.optimize(source, dtype=torch.float32, config=xopt.Config(linear_bn_folding=False, fuse_norm=False))
    with torch.no_grad():
        for x in (torch.randn(3, 5, 12), torch.randn(3, 12), torch.randn(3, 5, 12)):
            for model in (optimized, off):
                torch.testing.assert_close(model(x), source(x))
    assert any("batch_norm" in step for step in xopt.report(optimized).fusions[0].fused)
    assert not any("batch_norm" in step for fusion in xopt.report(off).fusions for step in fusion.fused)
