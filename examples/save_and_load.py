"""Save an optimized model and load it again: plain safetensors with the model's own keys, and a small manifest."""

import tempfile

import torch
from torch import nn

import xopt


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


model = xopt.optimize(make_model().eval(), dtype=torch.bfloat16)
x = torch.randn(4, 256)

with tempfile.TemporaryDirectory() as directory:
    xopt.save(model, directory)
    again = xopt.load(directory, make_model())

with torch.inference_mode():
    assert torch.equal(model(x), again(x))
print("The loaded model gives the same results. Its keys:", ", ".join(again.state_dict()))
