"""An architecture of your own: nothing in xopt knows it, and its blocks are fused all the same."""

import torch
from torch import nn
from torch.nn import functional

import xopt


class GatedBlock(nn.Module):
    """Attention with one projection each, then a gated MLP; norms before, residuals after."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(features, eps=1e-6), nn.RMSNorm(features, eps=1e-6)
        self.query, self.key, self.value, self.out = (nn.Linear(features, features) for _ in range(4))
        self.gate, self.up = (nn.Linear(features, 3 * features, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * features, features, bias=False)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, features = x.shape
        split = (batch, length, self.heads, features // self.heads)
        query, key, value = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_attention(x))
        y = self.norm_mlp(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(1000, 256), *(GatedBlock(256, 4) for _ in range(4)), nn.Linear(256, 1000)).eval()
words = torch.randint(0, 1000, (2, 64))
optimized = xopt.optimize(model, dtype=torch.bfloat16, sample_input=words)
print(xopt.report(optimized))

with torch.inference_mode():
    exact, result = model(words), optimized(words)
print("relative error in bf16:", float((result - exact).norm() / exact.norm()))
