"""ResNet-50 in bf16, given fp32 images, compared with torch alone in bf16 and in fp32.

    python examples/resnet50_bf16.py [--size full|tiny] [--batch 16] [--rounds 10]

The optimized model takes and returns fp32 and computes in bf16: nothing around it has to change. The model is made from
its configuration with random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import xopt

SIZES = {
    "full": (ResNetConfig(num_labels=1000), 224),
    "tiny": (ResNetConfig(num_labels=10, embedding_size=16, hidden_sizes=[32, 48, 64, 96], depths=[1] * 4), 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="ResNet-50 in bf16, optimized by xopt, against torch alone.")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config, pixels = SIZES[arguments.size]
    source = ResNetForImageClassification(config).eval()
    images = torch.rand(arguments.batch, 3, pixels, pixels)

    plain = copy.deepcopy(source).to(torch.bfloat16)
    model = xopt.optimize(source, dtype=torch.bfloat16, sample_input=images)
    contenders: dict[str, Callable[[], torch.Tensor]] = {
        "torch fp32": lambda: source(images).logits,
        "torch bf16": lambda: plain(images.bfloat16()).logits.float(),
        "xopt bf16": lambda: model(images).logits,
    }
    least = dict.fromkeys(contenders, float("inf"))
    with torch.no_grad():
        exact = contenders["torch fp32"]()
        errors = {name: float((call() - exact).norm() / exact.norm()) for name, call in contenders.items()}
        for _ in range(arguments.rounds):  # in turns: a shared machine is not as fast in one minute as in the next
            for name, call in contenders.items():
                started = time.perf_counter()
                call()
                least[name] = min(least[name], time.perf_counter() - started)

    print(xopt.report(model))
    for name, seconds in least.items():
        rate, speed = arguments.batch / seconds, least["torch bf16"] / seconds
        print(f"{name}: {rate:.1f} images/s, {speed:.2f}x torch bf16, off by {errors[name]:.1e} of the logits' norm")


if __name__ == "__main__":
    main()
