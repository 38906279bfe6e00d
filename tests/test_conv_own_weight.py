"""Convolutions whose forward computes its weight: packed once, and again when what it is computed from changes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import xopt
from tests.families import expect_input_gradients, kernel_calls
from tests.test_chain_programs import lengths_of_chains
from tests.test_optimize_conv import fused_in, relative_error

X = torch.randn(2, 8, 9, 11, generator=torch.Generator().manual_seed(0))


class Standardized(nn.Conv2d):
    eps = 1e-6

    def forward(self, input: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=self.eps)
        weight = weight.reshape_as(self.weight)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Padded(Standardized):
    """As TensorFlow pads: by sizes of the input, in the forward."""

    def forward(self, input: Tensor) -> Tensor:
        height, width = input.shape[-2:]
        bottom, right = (1 - height) % 2, (1 - width) % 2
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(F.pad(input, (0, right, 0, bottom)), weight, self.bias, self.stride, 1, groups=self.groups)


class Standardized1d(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.conv1d(input, self.weight * 0.5, self.bias, self.stride, self.padding, self.dilation, self.groups)


class OfTheInput(nn.Conv2d):
    """Its weight depends on more than parameters."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight * input.mean(), self.bias, self.stride, self.padding)


class OtherGeometry(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight * 2, self.bias, self.stride)


class Afterwards(nn.Conv2d):
    """It does something with the result."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight * 2, self.bias, self.stride, self.padding) + 1


class Gained(nn.Conv2d):
    def forward(self, input: Tensor, gain: float = 1.0) -> Tensor:
        return F.conv2d(input, self.weight * gain, self.bias, self.stride, self.padding)


class Flagged(nn.Conv2d):
    def forward(self, input: Tensor, normalize: bool = True) -> Tensor:
        weight = self.weight / self.weight.norm() if normalize else self.weight
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class Strided(nn.Conv2d):
    def forward(self, input: Tensor, stride: Any = None) -> Tensor:
        return F.conv2d(input, self.weight * 2, self.bias, stride or self.stride, self.padding)


class ByBatch(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean() if input.shape[0] > 1 else self.weight * 2
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class Twice(nn.Conv2d):
    """The first convolution has a weight of another kind."""

    def forward(self, input: Tensor) -> Tensor:
        first = F.conv2d(input, torch.ones_like(self.weight[:8]), None, 1, self.padding)
        return F.conv2d(first, self.weight * 2, self.bias, self.stride, self.padding)


class WrittenTo(nn.Conv2d):
    def forward(self, input: Tensor, factor: float = 1.0) -> Tensor:
        weight = self.weight * 2
        weight.view(-1).mul_(factor)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class Dropped(nn.Conv2d):
    """Another weight in each call."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, F.dropout(self.weight, 0.5, True), self.bias, self.stride, self.padding)


class WithGain(nn.Conv2d):
    """Its weight depends on two parameters and a buffer."""

    mask: Tensor

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)
        self.register_buffer("mask", (torch.rand(self.weight.shape) > 0.5).float())

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight * self.mask * self.gain, self.bias, self.stride, self.padding)


class Block(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = kind(8, 16, 3, padding=1, **options)
        self.second = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.second(self.first(x, *args, **kwargs).relu()).relu()  # type: ignore[no-any-return]


def conv_calls(model: nn.Module, x: Tensor) -> int:
    def count() -> int:
        return sum(calls for record, calls in kernel_calls().items() if record.startswith(("conv ", "gemm ")))

    before = count()
    with torch.no_grad():
        model(x)
    return count() - before


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Standardized, {}),
    "no bias, groups": (Standardized, {"bias": False, "groups": 4, "stride": 2}),
    "padded": (Padded, {"stride": 2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_packed_fused_and_exact(name: str, dtype: torch.dtype) -> None:
    kind, options = OPTIONS[name]
    source = Block(kind, **options).eval()
    exact = copy.deepcopy(source).double()(X.double())
    plain = relative_error(copy.deepcopy(source).to(dtype)(X.to(dtype)), exact)
    optimized: Any = xopt.optimize(source, dtype=dtype, sample_input=X)
    assert xopt.report(optimized).optimized_conv_share == 1.0
    assert fused_in(optimized) == ["conv+relu", "conv+relu"]
    for model in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        assert type(model.first).__name__ == kind.__name__
        for x in (X, X.contiguous(memory_format=torch.channels_last)):
            assert relative_error(model(x), exact) <= 1.1 * plain + 1e-6
        assert conv_calls(model, X) == 2
    assert relative_error(model(X[:, :, 1:]), copy.deepcopy(source).double()(X[:, :, 1:].double())) <= 2 * plain + 1e-6
    alone = copy.deepcopy(source.first).double()(X.double())
    assert relative_error(optimized.first(X), alone) <= 0.01
    for key, value in source.state_dict().items():
        assert torch.equal(optimized.state_dict()[key].to(dtype), value.to(dtype))


@pytest.mark.parametrize("name", ["plain", "no bias, groups"])
@torch.no_grad()
def test_a_link_of_chains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options = OPTIONS[name]
    source = Block(kind, **options).eval()
    optimized: Any = xopt.optimize(source, dtype=torch.float32, inplace=False)
    chained = lengths_of_chains(monkeypatch)
    for _ in range(3):
        torch.testing.assert_close(optimized(X), source(X), rtol=1e-4, atol=1e-5)
    assert chained == [2] * 3
    for model in (source, optimized):
        model.first.weight.data[:4] += 1.0
    torch.testing.assert_close(optimized(X), source(X), rtol=1e-4, atol=1e-5)
    for model in (source, optimized):
        model.first.eps = 0.5
    torch.testing.assert_close(optimized(X), source(X), rtol=1e-4, atol=1e-5)
    assert chained[3] == 2


@torch.no_grad()
def test_of_one_dimension_and_by_itself() -> None:
    source, x = Standardized1d(4, 6, 3).eval(), torch.randn(2, 4, 9)
    optimized = xopt.optimize(copy.deepcopy(source))
    torch.testing.assert_close(optimized(x), source(x))
    assert conv_calls(optimized, x) == 1


@pytest.mark.parametrize("kind", [OfTheInput, OtherGeometry, Afterwards])
@torch.no_grad()
def test_another_forward_is_left_alone(kind: Any) -> None:
    source = Block(kind).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    (entry,) = [entry for entry in xopt.report(optimized).entries if entry.path == "first"]
    assert (entry.optimized, entry.detail) == (False, "it has a forward of its own")
    torch.testing.assert_close(optimized(X), source(X))


CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    Gained: [((3.0,), {}), ((), {"gain": 2.0}), ((), {"gain": torch.tensor(3.0)})],
    Flagged: [((False,), {}), ((), {"normalize": False})],
    Strided: [((2,), {}), ((), {"stride": (1, 2)})],
    WrittenTo: [((3.0,), {}), ((), {"factor": 2.0})],
    ByBatch: [],
    Twice: [],
    Dropped: [],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a block"])
@pytest.mark.parametrize("kind", CALLS)
@torch.no_grad()
def test_only_the_packed_weight_is_taken_for_it(kind: Any, alone: bool, dtype: torch.dtype) -> None:
    source = Block(kind).eval()
    optimized: Any = xopt.optimize(source, dtype=dtype)
    models = (source.first, optimized.first) if alone else (source, optimized)
    for args, kwargs in [((), {}), *CALLS[kind], ((), {})]:
        for x in (X, X[:1], X[:, :, 1:]):
            results = []
            for model in models:
                torch.manual_seed(1)
                results.append(model(x, *args, **kwargs))
            assert relative_error(results[1], results[0]) <= (1e-5 if dtype == torch.float32 else 2e-2)


@torch.no_grad()
def test_a_weight_of_another_dtype_than_the_model() -> None:
    source = Block(Gained).eval()
    optimized: Any = xopt.optimize(source, dtype=torch.bfloat16, config=xopt.Config(autocast=False))
    for gain in (1.0, 3.0):
        for model in (optimized, optimized.first):
            expected = (source if model is optimized else source.first)(X, gain)
            assert relative_error(model(X.bfloat16(), gain), expected) <= 2e-2


@torch.no_grad()
def test_a_weight_of_several_parameters() -> None:
    source = Block(WithGain).eval()
    optimized: Any = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    assert fused_in(optimized) == ["conv+relu", "conv+relu"]
    assert conv_calls(optimized, X) == conv_calls(optimized.first, X) + 1 == 2
    for name in ("gain", "mask", "bias"):
        for model in (source, optimized):
            getattr(model.first, name)[0] = 5.0
        torch.testing.assert_close(optimized(X), source(X))
        torch.testing.assert_close(optimized.first(X), source.first(X))


@torch.no_grad()
def test_an_attribute_may_change_what_the_weight_is_made_of() -> None:
    source = Block(Standardized).eval()
    optimized: Any = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    for eps in (0.1, 1.0):
        for model in (source, optimized):
            model.first.eps = eps
        torch.testing.assert_close(optimized(X), source(X))
        assert fused_in(optimized) == ["conv+relu", "conv+relu"]


@torch.no_grad()
def test_new_values_are_seen() -> None:
    source = Block(Standardized).eval()
    for sample in (None, X):
        optimized: Any = xopt.optimize(source, dtype=torch.float32, sample_input=sample)
        other = copy.deepcopy(source)
        for model in (optimized, other):
            model.first.weight[0].add_(torch.linspace(-1, 1, 72).reshape(8, 3, 3).abs())
        torch.testing.assert_close(optimized(X), other(X))
        for model in (optimized, other):
            model.first.eps = 0.1
        torch.testing.assert_close(optimized(X), other(X))
        optimized.load_state_dict(source.state_dict())
        other.load_state_dict(source.state_dict())
        torch.testing.assert_close(optimized(X), other(X))
        weight = {"first.weight": torch.randn(16, 8, 3, 3)}
        expected = torch.func.functional_call(other, weight, (X,))
        torch.testing.assert_close(torch.func.functional_call(optimized, weight, (X,)), expected)
        torch.testing.assert_close(optimized.double()(X.double()), other.double()(X.double()))


@torch.no_grad()
def test_compile_and_export() -> None:
    source = Block(Standardized).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(optimized, fullgraph=True, backend="eager")(X), source(X))
    torch.testing.assert_close(torch.export.export(optimized, (X,)).module()(X), source(X))


def test_gradients() -> None:
    source = Block(Standardized).eval().requires_grad_(False)
    optimized: Any = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    expect_input_gradients(optimized, source, X, tolerance=1e-4)
    for model in (source, optimized):
        model.first.weight.requires_grad_()
        model(X).square().sum().backward()
    torch.testing.assert_close(optimized.first.weight.grad, source.first.weight.grad, rtol=1e-4, atol=1e-4)
