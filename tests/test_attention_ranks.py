"""Attention of torch's with other than four dimensions is on xopt's kernel, in recorded forwards and in others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import xopt

Tensor = torch.Tensor
WIDTH, HEADS = 64, 4
SIZES = ((2, 3, 10), (2, 3, 10), (1, 4, 7), (2, 1, 33))


def one_head(qkv: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = qkv.flatten(0, 1).chunk(3, -1)
    return functional.scaled_dot_product_attention(q, k, v, mask).view(*qkv.shape[:3], WIDTH)


def heads_before_blocks(qkv: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(3, 0, 4, 1, 2, 5)
    return functional.scaled_dot_product_attention(q, k, v, mask).permute(0, 2, 3, 1, 4).flatten(3)


def heads_after_blocks(qkv: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(3, 0, 1, 4, 2, 5)
    return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(2, 3).flatten(3)


def seen_at_once(qkv: Tensor, mask: Tensor | None) -> Tensor:
    """Torch's result is contiguous, and may be seen otherwise."""
    q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(3, 0, 4, 1, 2, 5)
    batch, blocks, length, _ = qkv.shape
    attended = functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3).view(batch, -1, WIDTH // HEADS)
    return attended.view(batch, blocks, length, WIDTH)


def no_dimension_for_heads(qkv: Tensor, mask: Tensor | None) -> Tensor:
    """Whichever is taken, the others are not one without a copy."""
    q, k, v = (part.unflatten(-1, (2, 2, -1)).permute(4, 0, 3, 1, 2, 5) for part in qkv.chunk(3, -1))
    attended = functional.scaled_dot_product_attention(q, k, v, mask)
    return attended.permute(1, 3, 4, 0, 2, 5).flatten(3)


def masks_of(attend: Callable[..., Any], batch: int, blocks: int, length: int) -> list[Tensor | None]:
    squares = torch.linspace(-3, 3, batch * blocks * length * length).sin().view(batch, blocks, length, length)
    own = {
        one_head: squares.flatten(0, 1),
        heads_before_blocks: squares[:, None],
        heads_after_blocks: squares[0, :, None],
        seen_at_once: squares[0],
        no_dimension_for_heads: squares[:, None],
    }
    return [None, squares[0, 0] > -0.5, own[attend]]


class Attention(nn.Module):
    def __init__(self, attend: Callable[..., Tensor], is_recorded: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend, self.is_recorded = attend, is_recorded

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if not self.is_recorded:
            float(x.sum())  # a number out of a tensor: no recording knows it
        return self.out(self.attend(self.qkv(x), mask))


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "as it is"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "attend",
    [one_head, heads_before_blocks, heads_after_blocks, seen_at_once, no_dimension_for_heads],
    ids=lambda attend: attend.__name__,
)
def test_attention(attend: Callable[..., Tensor], dtype: torch.dtype, is_recorded: bool) -> None:
    torch.manual_seed(0)
    source = Attention(attend, is_recorded).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    most = 1e-5 if dtype == torch.float32 else 2e-2
    for sizes in SIZES:
        x = torch.randn(*sizes, WIDTH)
        for mask in masks_of(attend, *sizes):
            with torch.no_grad():
                result, exact = optimized(x, mask), source(x, mask)
            assert float((result - exact).norm() / exact.norm()) < most
    report = xopt.report(optimized, (torch.randn(2, 3, 10, WIDTH),))
    assert report.multiply_add_share == 1.0
    assert not is_recorded or "attention" in [step for fusion in report.fusions for step in fusion.fused]


def test_gradients_and_groups_are_torchs() -> None:
    """What the kernel does not take in these dimensions gives what torch gives."""
    torch.manual_seed(0)
    source = Attention(heads_after_blocks, True).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(2, 3, 10, WIDTH, requires_grad=True)
    (exact,) = torch.autograd.grad(source(x).sum(), x)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(optimized(x).sum(), x)[0], exact, rtol=1e-4, atol=1e-5)

    def grouped(qkv: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = qkv[0].chunk(3, -1)
        return functional.scaled_dot_product_attention(q, k[:1], v[:1], enable_gqa=True)[None]

    source = Attention(grouped, True).eval()
    optimized = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)


def one_key_for_all_heads(qkv: Tensor, mask: Tensor | None) -> Tensor:
    """Without a word to torch of groups: the keys' one head is broadcast."""
    q, k, v = qkv.flatten(0, 1).chunk(3, -1)
    k, v = (part[..., : WIDTH // HEADS].unsqueeze(1) for part in (k, v))
    attended = functional.scaled_dot_product_attention(q.unflatten(-1, (HEADS, -1)).transpose(1, 2), k, v, mask)
    return attended.transpose(1, 2).reshape(*qkv.shape[:3], WIDTH)


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "as it is"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_of_one_head(dtype: torch.dtype, is_recorded: bool) -> None:
    torch.manual_seed(0)
    source = Attention(one_key_for_all_heads, is_recorded).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    most = 1e-5 if dtype == torch.float32 else 2e-2
    for sizes in SIZES:
        x, length = torch.randn(*sizes, WIDTH), sizes[2]
        for mask in (None, torch.ones(length, length, dtype=torch.bool).tril()):
            with torch.no_grad():
                result, exact = optimized(x, mask), source(x, mask)
            assert float((result - exact).norm() / exact.norm()) < most
    report = xopt.report(optimized, (torch.randn(2, 3, 10, WIDTH),))
    assert report.multiply_add_share == 1.0
