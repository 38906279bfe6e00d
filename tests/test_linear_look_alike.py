"""Modules that are no nn.Linear and do what it does: packed where their forward says so, in the calls where it does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.families import expect_input_gradients, kernel_calls

X = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    factor: Tensor

    def __init__(self, inputs: int = 48, outputs: int = 48, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 8)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None
        self.register_buffer("factor", torch.ones(1))
        self.doubled: Any = False


class LookAlike(Layer):
    """A layer of a library's own, with a mode that is off and a result beside the product."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        if not self.doubled:
            return functional.linear(x, weight=self.weight, bias=self.bias), None
        return functional.linear(x, 2 * self.weight, self.bias) * self.factor, scale


class ProductAlone(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() if self.bias is None else x @ self.weight.t() + self.bias


class ProductLast(Layer):
    def forward(self, x: Tensor, wanted: bool = False) -> Any:
        return "linear", wanted, functional.linear(x, self.weight, self.bias)


class Scaled(Layer):
    def forward(self, x: Tensor) -> Any:
        return functional.linear(x, self.weight, self.bias) * self.factor


class InputBeside(Layer):
    def forward(self, x: Tensor) -> Any:
        return functional.linear(x, self.weight, self.bias), x


class ByMethod(Layer):
    """Another method may look at anything."""

    def product(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


class ByProperty(Layer):
    @property
    def mode(self) -> bool:
        return bool(self.doubled)

    def forward(self, x: Tensor) -> Any:
        return functional.linear(x, self.weight, self.bias) if not self.mode else x


class TwoInputs(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


PACKED = [LookAlike, ProductAlone, ProductLast]
OTHERS = [Scaled, InputBeside, ByMethod, ByProperty, TwoInputs]


class Block(nn.Module):
    def __init__(self, kind: type[Layer], bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = kind(bias=bias), kind(bias=bias)

    def of(self, layer: nn.Module, x: Tensor) -> Tensor:
        result = layer(x, x) if isinstance(layer, TwoInputs) else layer(x)
        return next(each for each in result if isinstance(each, Tensor)) if isinstance(result, tuple) else result

    def forward(self, x: Tensor) -> Tensor:
        return x + self.of(self.second, self.of(self.first, x).relu())


def products(model: nn.Module, *inputs: Any) -> int:
    before = sum(count for record, count in kernel_calls().items() if record.startswith("gemm "))
    with torch.no_grad():
        model(*inputs)
    return sum(count for record, count in kernel_calls().items() if record.startswith("gemm ")) - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", PACKED)
@torch.no_grad()
def test_is_packed_and_fused(kind: type[Layer], bias: bool, dtype: torch.dtype) -> None:
    source = Block(kind, bias).eval()
    optimized: Any = xopt.optimize(source, dtype=dtype, sample_input=X)
    assert xopt.report(optimized).optimized_linear_share == 1.0
    assert [step for fusion in xopt.report(optimized).fusions for step in fusion.fused] == ["linear+relu", "linear+add"]
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-5
    for model in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        assert isinstance(model.first, kind)
        assert type(model.first).__name__ == kind.__name__
        torch.testing.assert_close(model(X), source(X), rtol=tolerance, atol=tolerance)
        assert products(model, X) == 2
    alone, result = source.first(X), optimized.first(X)
    assert type(result) is type(alone)
    if isinstance(result, tuple):
        assert [each for each in result if not isinstance(each, Tensor)] == [
            each for each in alone if not isinstance(each, Tensor)
        ]
    for name, value in source.state_dict().items():
        assert torch.equal(optimized.state_dict()[name], value.to(optimized.state_dict()[name].dtype))


@pytest.mark.parametrize("kind", OTHERS)
@torch.no_grad()
def test_another_forward_stays(kind: type[Layer]) -> None:
    """Its weight is packed none the less, which test_own_products.py is about."""
    source = Block(kind).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    for entry in xopt.report(optimized).entries:
        assert (entry.optimized, entry.detail) == (True, "packed as float32: weight")
    torch.testing.assert_close(optimized(X), source(X), rtol=1e-4, atol=1e-4)
    assert products(optimized, X) == 2


@torch.no_grad()
def test_another_mode_is_its_own_forward() -> None:
    """Set before a program is made, after that, and taken back; and for one call by an argument."""
    source = Block(LookAlike).eval()
    for sample in (None, X):
        optimized: Any = xopt.optimize(source, dtype=torch.float32, sample_input=sample)
        for mode in (True, False, True, 1, 0):
            source.first.doubled = optimized.first.doubled = mode
            for _ in range(3):  # as it was, recorded, as a program
                torch.testing.assert_close(optimized(X), source(X))
            assert type(mode) is int or products(optimized, X) == (1 if mode else 2)
        scale = torch.ones(3)
        source.first.doubled = optimized.first.doubled = True
        assert optimized.first(X, scale)[1] is scale
        assert optimized.first(X, scale=scale)[1] is scale
        source.first.doubled = optimized.first.doubled = False
        torch.testing.assert_close(optimized.first(X, scale), source.first(X, scale))


@torch.no_grad()
def test_other_weights_are_used() -> None:
    source = Block(LookAlike).eval()
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    other = {"first.weight": torch.randn(48, 48)}
    expected = torch.func.functional_call(source, other, (X,))
    torch.testing.assert_close(torch.func.functional_call(optimized, other, (X,)), expected)
    for model in (source, optimized):
        model.load_state_dict({**source.state_dict(), **other})
    torch.testing.assert_close(optimized(X), source(X))


def test_a_gradient_of_the_input() -> None:
    source = Block(LookAlike).eval().requires_grad_(False)
    optimized = xopt.optimize(source, dtype=torch.float32, sample_input=X)
    expect_input_gradients(optimized, source, X)


@torch.no_grad()
def test_compile_and_export() -> None:
    source = Block(LookAlike).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(optimized, fullgraph=True, backend="eager")(X), source(X))
    torch.testing.assert_close(torch.export.export(optimized, (X,)).module()(X), source(X))


@torch.no_grad()
def test_ibert_quantizes_when_it_is_told_to() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(0)
    source = transformers.IBertModel(transformers.IBertConfig(vocab_size=50, **sizes)).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    inputs = {"input_ids": torch.arange(3, 19)[None]}
    report = xopt.report(optimized, inputs)
    assert report.multiply_add_share is not None
    assert report.multiply_add_share >= 0.95
    torch.testing.assert_close(optimized(**inputs)[0], source(**inputs)[0], rtol=1e-4, atol=1e-4)
    layers = [(source.encoder.layer[0].output.dense, optimized.encoder.layer[0].output.dense)]
    x, scale = torch.randint(-100, 100, (1, 3, 128)) / 100, torch.tensor([0.01])
    for theirs, ours in layers:
        theirs.quant_mode = ours.quant_mode = True
        for one, other in zip(ours(x, scale), theirs(x, scale), strict=True):
            torch.testing.assert_close(one, other)
