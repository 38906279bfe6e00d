"""An autocast inference script, unchanged but for the line that optimizes."""

import torch
from torch import nn

import xopt


class Classifier(nn.Module):
    """An architecture of the user's own: nothing in xopt knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 128)
        self.mix = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 128))
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        return self.head(self.norm(x + self.mix(x)).mean(dim=1))


model = Classifier().eval()
optimized = xopt.optimize(model, dtype=torch.bfloat16)
words = torch.randint(0, 1000, (2, 16))

with torch.inference_mode():
    exact = model(words)
    with torch.autocast("cpu", torch.bfloat16):
        result = optimized(words)
    unchanged = optimized(words)

print(xopt.report(optimized))
print("under autocast:", result.dtype, " without:", unchanged.dtype)
print("relative error:", float((unchanged - exact).norm() / exact.norm()))
