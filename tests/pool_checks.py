"""What the tests of pooling and of pooling to a given size have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import xopt
from tests import reference
from tests.conv_cases import last
from tests.families import expect_values, kernel_calls


def expect_pooled(got: Tensor, x: Tensor, kind: str, exact: Callable[[Tensor], Tensor], terms: int) -> None:
    """`exact`: torch's function. `terms`: the most values that a mean or a norm is of."""
    if len(x) == 0:
        value = exact(torch.zeros((1, *x.shape[1:]), dtype=torch.float64))[:0]
    else:
        value = exact(x.contiguous().double())
    rows = value.movedim(1, -1).reshape(-1, x.shape[1])
    error = torch.zeros_like(rows)
    if kind != "max":
        magnitude = exact(x.contiguous().double().abs()) if len(x) else value
        error = magnitude.movedim(1, -1).reshape(rows.shape) * (terms + 2) * reference.U32 + reference.DENORMAL
    never = torch.zeros_like(rows, dtype=torch.bool)
    in_memory = (len(x), *value.shape[2:], x.shape[1])
    expected = reference.Estimate(rows, error, never, never)
    expect_values("the output", got.movedim(1, -1), expected, in_memory, x.dtype)


def check_module(source: nn.Module, x: Tensor, others: Sequence[Tensor] = ()) -> None:
    """On our kernel for channels last and without indices. `others`: inputs that are left to torch, as `x` is."""
    gives_indices = bool(getattr(source, "return_indices", False))
    model = xopt.optimize(nn.Sequential(source).eval())
    for each in (x, last(x), last(x)[:, 3:], last(x).bfloat16(), *others):
        before = kernel_calls()
        with torch.no_grad():
            result, expected = model(each), source(each)
        for one, other in zip(result, expected, strict=True) if gives_indices else [(result, expected)]:
            assert one.shape == other.shape
            rtol = 1e-2 if each.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(one, other, rtol=rtol, atol=1e-6)  # a mean of values near 1 may be any small number
        is_torchs = gives_indices or each is x or any(each is other for other in others)
        assert ("pool" in _kernels_since(before)) == (not is_torchs)
    leaf = last(x).requires_grad_()
    if not gives_indices:
        model(leaf).sum().backward()
        assert leaf.grad is not None
    assert isinstance(model[0], type(source))


class _Pools(nn.Module):
    """As forwards call torch's functions; `pool` is what differs."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 20, 1), pool

    def forward(self, x: Tensor) -> Any:
        return self.pool(self.conv(x))


@torch.no_grad()
def check_in_recorded_forward(pool: Any, dtype: torch.dtype, *, ours: bool) -> None:
    source = _Pools(pool).eval()
    model = xopt.optimize(source, dtype=dtype)
    for size in ((2, 3, 9, 10), (1, 3, 12, 7)):
        x = last(torch.randn(size))
        for _ in range(2):
            before = kernel_calls()
            tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(model(x), source(x), rtol=tolerance, atol=tolerance)
        used = _kernels_since(before)
        assert ("pool" in used) == ours, used


def _kernels_since(before: Any) -> set[str]:
    return {record.split()[0] for record, count in kernel_calls().items() if count > before[record]}
