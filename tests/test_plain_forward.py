"""Subclasses of nn.Linear with a forward of their own: a linear layer where it says what nn.Linear's does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt

X = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))


class WrittenOut(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class BiasFirst(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return self.bias + torch.matmul(input, self.weight.transpose(0, 1))


class Called(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, bias=self.bias)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T * 2 + self.bias


class NotTransposed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight + self.bias


class WithoutBias(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T


class BiasTwice(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias) + self.bias


class Switched(nn.Linear):
    doubled = False

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + (2 * self.bias if self.doubled else self.bias)


class Noisy(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + (self.bias + 1 if self.training else self.bias)


class OnValue(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias if input.sum() > -1e9 else input


class ByDims(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        product = input @ self.weight.T + self.bias
        return product if input.dim() == 3 else product * 2


class BySize(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        product = input @ self.weight.T + self.bias
        return product if input.shape[0] < 3 else product * 2


class Masked(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.linear(x, self.weight if mask is None else self.weight * mask, self.bias)


class Scaled(nn.Linear):
    def forward(self, input: Tensor, *added: Tensor, scale: float = 1.0) -> Tensor:
        product = functional.linear(input, self.weight, self.bias)
        return (product + sum(added) if added else product) * scale if scale != 1.0 or added else product


PLAIN = [WrittenOut, BiasFirst, Called, Masked, Scaled]
OTHERS = [Doubled, NotTransposed, WithoutBias, BiasTwice, Switched, Noisy, OnValue, ByDims, BySize]


def model_of(kind: type[nn.Linear], bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(48, 48, bias=bias), nn.ReLU()).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", PLAIN)
@torch.no_grad()
def test_is_packed(kind: type[nn.Linear], bias: bool, dtype: torch.dtype) -> None:
    if kind is BiasFirst and not bias:
        pytest.skip("it needs one")
    source = model_of(kind, bias)
    optimized: Any = xopt.optimize(source, dtype=dtype, sample_input=X)
    assert xopt.report(optimized).optimized_linear_share == 1.0
    assert [step for fusion in xopt.report(optimized).fusions for step in fusion.fused] == ["linear+relu"]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for model in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        assert type(model[0]).__name__ == kind.__name__
        assert isinstance(model[0], kind)
        torch.testing.assert_close(model(X), source(X), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", OTHERS)
@torch.no_grad()
def test_another_forward_stays(kind: type[nn.Linear]) -> None:
    """Its weight is packed none the less, which test_own_products.py is about."""
    source = model_of(kind)
    optimized = xopt.optimize(source, dtype=torch.float32)
    (entry,) = xopt.report(optimized).entries
    assert entry.optimized
    assert entry.detail == "packed as float32: weight"
    for switched in (False, False, True):
        for model in (source, optimized):
            model[0].doubled = switched  # type: ignore[assignment]
        for x in (X, X[:1], X[0]):
            torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-4)


CALLS: list[tuple[type[nn.Linear], tuple[Any, ...], dict[str, Any]]] = [
    *((kind, (X,), {}) for kind in (WrittenOut, Masked, Scaled)),
    (WrittenOut, (), {"input": X}),
    (Masked, (), {"x": X}),
    (Masked, (X, None), {}),
    (Masked, (X, torch.eye(48)), {}),
    (Masked, (), {"x": X, "mask": torch.eye(48)}),
    (Scaled, (), {"input": X, "scale": 2.0}),
    (Scaled, (X, X, X), {"scale": 3.0}),
]


class Calls(nn.Module):
    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.layer, self.last = kind(48, 48), nn.Linear(48, 48)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.last(self.layer(*args, **kwargs).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", range(len(CALLS)))
@torch.no_grad()
def test_it_takes_what_the_source_takes(call: int, dtype: torch.dtype) -> None:
    kind, args, kwargs = CALLS[call]
    source = Calls(kind).eval()
    optimized: Any = xopt.optimize(source, dtype=dtype)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for _ in range(2):
        expected = source(*args, **kwargs)
        torch.testing.assert_close(optimized(*args, **kwargs), expected, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:
        expected = source.layer(*args, **kwargs)
        torch.testing.assert_close(optimized.layer(*args, **kwargs), expected, rtol=tolerance, atol=tolerance)
