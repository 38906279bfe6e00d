"""A factor and an addend of one value each behind a convolution's activation: done with its sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.families import expect_input_gradients
from tests.test_linear_batch_norm import relative_error

X = torch.randn(2, 16, 7, 9, generator=torch.Generator().manual_seed(0))
Act = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """As in HGNetV2, D-FINE and PP-LCNet."""

    def __init__(self, act: Act = functional.relu, scale: float = 0.7, shift: float = -0.3, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.act = nn.Conv2d(16, 24, 3, padding=1, bias=bias), nn.BatchNorm2d(24), act
        self.last = nn.Conv2d(24, 16, 1)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
        self.scale, self.shift = (nn.Parameter(torch.tensor([value])) for value in (scale, shift))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale * self.act(self.norm(self.conv(x))) + self.shift)  # type: ignore[no-any-return]


class Residual(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.shift + self.act(self.norm(self.conv(x))) * self.scale
        return x + self.last(y) + (y + y.flip(0)).mean()  # type: ignore[no-any-return]


class AddedBetween(Block):
    """Not with the sums: the sum that the activation is of has a part that is not the convolution's."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return self.last(self.scale * self.act(y + x.mean(1, keepdim=True).expand_as(y)) + self.shift)  # type: ignore[no-any-return]


class WantedBefore(Block):
    """Not with the sums: what the activation gives is wanted, too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.conv(x)))
        return self.last(self.scale * y + self.shift) + y.amax(1, keepdim=True)  # type: ignore[no-any-return]


class OfChannels(Block):
    """Not with the sums: the addend has a value for each channel, and no bound is all channels'."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(24, 1, 1))


def told(model: nn.Module) -> list[str]:
    return [step for fusion in xopt.report(model).fusions for step in fusion.fused]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("source", "step"),
    [
        (Block(), "conv+batch_norm+relu+affine"),
        (Block(scale=-0.7, shift=0.4, bias=True), "conv+batch_norm+relu+affine"),
        (Block(scale=0.0), "conv+batch_norm+relu+affine"),
        (Block(functional.relu6, 1.5), "conv+batch_norm+clamp+affine"),
        (Block(functional.relu6, -1.5), "conv+batch_norm+clamp+affine"),
        (Residual(), "conv+batch_norm+relu+affine"),
        (Block(functional.silu), ""),
        (AddedBetween(), ""),
        (WantedBefore(), ""),
        (OfChannels(), ""),
    ],
)
@torch.no_grad()
def test_is_as_exact_as_torch(source: Block, step: str, dtype: torch.dtype) -> None:
    source = copy.deepcopy(source).eval()
    optimized = xopt.optimize(source, dtype=dtype, sample_input=X)
    exact = copy.deepcopy(source).double()(X.double())
    theirs = copy.deepcopy(source).to(dtype)(X.to(dtype))
    for _ in range(3):
        assert relative_error(optimized(X), exact) <= 1.1 * relative_error(theirs, exact) + 1e-6
    steps = told(optimized)
    assert step in steps if step else not any("affine" in each for each in steps), steps
    state = optimized.state_dict()
    for name, value in source.state_dict().items():
        assert torch.equal(state[name], value.to(state[name].dtype))


@torch.no_grad()
def test_keeps_nan_and_infinities() -> None:
    x = X.clone()
    x[0, :, 0, 0], x[0, :, 3, 3], x[1, :, 3, 3] = float("nan"), float("inf"), -float("inf")
    for scale in (0.7, -0.7):
        source = Block(scale=scale).eval()
        source.last = nn.Identity()  # type: ignore[assignment]
        optimized = xopt.optimize(source, dtype=torch.float32, sample_input=X)
        torch.testing.assert_close(optimized(x), source(x), equal_nan=True, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_sees_new_values_and_other_shapes() -> None:
    source = Block().eval()
    optimized: Any = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    for scale, shift in ((0.7, -0.3), (-1.2, 0.1), (0.0, 0.5), (2.0, 0.0)):
        for model in (source, optimized):
            model.scale.fill_(scale)
            model.shift.fill_(shift)
        for x in (X, X, X[:1, :, :4]):
            torch.testing.assert_close(optimized(x), source(x), rtol=1e-5, atol=1e-5)


def test_gradients_and_the_callers_parameters() -> None:
    source = Block().eval().requires_grad_(False)
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    expect_input_gradients(optimized, source, X)
    other = {"scale": torch.tensor([3.0]), "shift": torch.tensor([0.25])}
    with torch.no_grad():
        for _ in range(2):
            result = torch.func.functional_call(optimized, other, (X,))
            torch.testing.assert_close(result, torch.func.functional_call(source, other, (X,)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(optimized(X), source(X), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_an_image_that_is_upsampled_before() -> None:
    """Whose convolution is one of the small image."""

    class Upsampled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(functional.interpolate(x, scale_factor=2.0))

    source = Upsampled().eval()
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    for x in (X, X, X[:1]):
        torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)
    assert "upsample+conv+batch_norm+relu+affine" in told(optimized)
