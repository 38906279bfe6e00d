"""ResNet-50 in fp32, as IPEX's introductory example has it, compared with torch alone.

    python examples/resnet50_fp32.py [--size full|tiny] [--batch 1] [--rounds 20]

The calls of `to(memory_format=torch.channels_last)` may stay or go: inside, images have their channels last anyway.
The model is made from its configuration with random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import xopt

SIZES = {
    "full": (ResNetConfig(), 224),
    "tiny": (ResNetConfig(embedding_size=16, hidden_sizes=[32, 48, 64, 96], depths=[1, 1, 1, 1]), 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="ResNet-50 in fp32, optimized by xopt, against torch alone.")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config, pixels = SIZES[arguments.size]
    source = ResNetForImageClassification(config).eval()
    images = torch.rand(arguments.batch, 3, pixels, pixels)

    source = source.to(memory_format=torch.channels_last)
    images = images.to(memory_format=torch.channels_last)
    model = xopt.optimize(source)

    contenders = {"torch": source, "xopt": model}
    least = dict.fromkeys(contenders, float("inf"))
    with torch.no_grad():
        answers = {name: contender(images).logits for name, contender in contenders.items()}
        for _ in range(arguments.rounds):  # in turns: a shared machine is not as fast in one minute as in the next
            for name, contender in contenders.items():
                started = time.perf_counter()
                contender(images)
                least[name] = min(least[name], time.perf_counter() - started)

    print(xopt.report(model))
    difference = float((answers["xopt"] - answers["torch"]).norm() / answers["torch"].norm())
    for name, seconds in least.items():
        print(f"{name}: {1e3 * seconds:.2f} ms, {least['torch'] / seconds:.2f}x")
    print(f"The logits differ by {difference:.1e} of their norm.")


if __name__ == "__main__":
    main()
