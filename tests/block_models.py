"""What tests of blocks share: an input, blocks that can be fused, and what is asked of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt

torch.manual_seed(0)
X = torch.randn(2, 5, 64)


class Mlp(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = functional.gelu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.activation = activation
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.up(x))
        return self.down(y if self.scale == 1 else y * self.scale)  # type: ignore[no-any-return]


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.LayerNorm(64), Mlp(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mlp(self.norm(x)))  # type: ignore[no-any-return]


class WrittenOutRmsNorm(nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 0.5)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * (self.weight + self.offset)).type_as(x) if self.offset else self.weight * normed.to(x.dtype)


class Gated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = functional.silu) -> None:
        super().__init__()
        self.norm = WrittenOutRmsNorm()
        self.gate, self.up, self.down = (nn.Linear(64, 96, bias=False) for _ in range(3))
        self.down = nn.Linear(96, 64)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(self.activation(self.gate(y)) * self.up(y)) + x  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, 4, 16).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, 64))  # type: ignore[no-any-return]


def calls() -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in xopt.kernels():
        counts[record.name] = counts.get(record.name, 0) + record.calls
    return counts


def assert_gone_when_dropped(models: list[nn.Module]) -> None:
    """Of a list with the only reference: without the garbage collector."""
    alive = weakref.ref(models[0])
    gc.disable()
    try:
        models.clear()
        assert alive() is None
    finally:
        gc.enable()
