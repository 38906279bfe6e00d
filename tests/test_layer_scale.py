"""A layer scale after a linear layer or a convolution: done with its sums, as is the residual; every parameter stays
where it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.families import expect_input_gradients
from tests.test_linear_batch_norm import relative_error

X = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 48, 4, 6, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48, bias=bias)
        self.scale = nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * self.scale  # type: ignore[no-any-return]


class ScaledFirst(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale.view(1, 1, -1) * self.down(self.up(x).relu()) + x  # type: ignore[no-any-return]


class ScaledTokens(Scaled):
    """ConvNeXt's block: tokens inside, an image outside."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.down(self.up(x.permute(0, 2, 3, 1)).relu())
        return x + y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class ScaledImage(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x.permute(0, 2, 3, 1)).relu()).permute(0, 3, 1, 2)
        return y * self.scale.reshape(1, -1, 1, 1) + x  # type: ignore[no-any-return]


class ScaledBefore(Scaled):
    """Not with the sums: an activation stands between them."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x)).relu() * self.scale  # type: ignore[no-any-return]


class ScaledRows(Scaled):
    """Not with the sums: it has one value for each row."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * self.scale[:5].view(5, 1)  # type: ignore[no-any-return]


class AddedTwice(Scaled):
    """The scaled product is wanted for itself, too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).relu()) * self.scale
        return x + y + y.sum(-1, keepdim=True)  # type: ignore[no-any-return]


class ScaledConv(Scaled):
    """As FastViT's blocks and MetaFormer's, whose scales are images of one position."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__(bias)
        self.up, self.down = nn.Conv2d(48, 96, 3, padding=1), nn.Conv2d(96, 48, 1, bias=bias)  # type: ignore[assignment]
        self.scale = nn.Parameter(torch.randn(48, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.up(x).relu())  # type: ignore[no-any-return]


class ScaledConvByVector(ScaledConv):
    def __init__(self, bias: bool = True) -> None:
        super().__init__(bias)
        self.scale = nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) * self.scale[:, None, None] + x  # type: ignore[no-any-return]


class ScaledNorm(ScaledConv):
    """Behind a BatchNorm (EfficientFormerV2, MobileNetV4)."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__(bias)
        self.norm = nn.BatchNorm2d(48, affine=bias)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(self.up(x).relu())) * self.scale  # type: ignore[no-any-return]


class ScaledTwice(ScaledNorm):
    """One of which goes with the sums."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(self.up(x).relu())) * self.scale * self.scale  # type: ignore[no-any-return]


class ScaledColumns(ScaledConv):
    """Not with the sums: it has one value for each column."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__(bias)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) * self.scale + x  # type: ignore[no-any-return]


FUSED: dict[type[Scaled], str] = {
    ScaledConv: "conv+layer_scale+add",
    ScaledConvByVector: "conv+layer_scale+add",
    ScaledNorm: "conv+batch_norm+layer_scale+add",
    ScaledTwice: "conv+batch_norm+layer_scale",
    Scaled: "linear+layer_scale+add",
    ScaledFirst: "linear+layer_scale+add",
    ScaledTokens: "linear+layer_scale+add",
    ScaledImage: "linear+layer_scale+add",
    AddedTwice: "linear+layer_scale",
}


def input_of(kind: type[Scaled]) -> Tensor:
    return IMAGE if kind in (ScaledTokens, ScaledImage) or issubclass(kind, ScaledConv) else X


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*FUSED, ScaledBefore, ScaledRows, ScaledColumns])
@torch.no_grad()
def test_is_as_exact_as_torch(kind: type[Scaled], dtype: torch.dtype, bias: bool) -> None:
    source, x = kind(bias).eval(), input_of(kind)
    optimized = xopt.optimize(source, dtype=dtype, sample_input=x)
    exact = copy.deepcopy(source).double()(x.double())
    theirs = copy.deepcopy(source).to(dtype)(x.to(dtype))
    for _ in range(2):
        assert relative_error(optimized(x), exact) <= 1.1 * relative_error(theirs, exact) + 1e-6
    fused = [step for fusion in xopt.report(optimized).fusions for step in fusion.fused]
    expected = FUSED.get(kind)
    assert expected in fused if expected else not any("layer_scale" in step for step in fused), fused
    state = optimized.state_dict()
    for name, value in source.state_dict().items():
        assert torch.equal(state[name], value.to(state[name].dtype))


@pytest.mark.parametrize("kind", [Scaled, ScaledConv, ScaledConvByVector, ScaledNorm])
@torch.no_grad()
def test_sees_a_new_scale_and_other_shapes(kind: type[Scaled]) -> None:
    source, x = kind().eval(), input_of(kind)
    optimized: Any = xopt.optimize(source, dtype=torch.float32, sample_input=x)
    for model in (source, optimized):
        model.scale.mul_(2.0)
    torch.testing.assert_close(optimized(x), source(x), rtol=1e-5, atol=1e-5)
    smaller = x[:1, :3] if x is X else x[:1, :, :3]
    torch.testing.assert_close(optimized(smaller), source(smaller), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Scaled, ScaledConv, ScaledConvByVector, ScaledNorm])
def test_gradients_and_weights_of_the_caller(kind: type[Scaled]) -> None:
    source, x = kind().eval().requires_grad_(False), input_of(kind)
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=x)
    expect_input_gradients(optimized, source, x)
    other = {"down.weight": torch.randn_like(source.down.weight)}
    with torch.no_grad():
        result = torch.func.functional_call(optimized, other, (x,))
        torch.testing.assert_close(result, torch.func.functional_call(source, other, (x,)), rtol=1e-5, atol=1e-5)
