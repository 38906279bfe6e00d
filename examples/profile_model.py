"""Where the time of a model goes, before and after `xopt.optimize`, and what got faster.

    python examples/profile_model.py [--size full|tiny] [--dtype float32|bfloat16] [--html report.html]

`xopt-profile script.py` does the same for a script as it stands. The model is made from its configuration with random
weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from transformers import BertConfig, BertModel

import xopt

SIZES = {
    "full": BertConfig(),
    "tiny": BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Profiles BERT as it is and optimized by xopt.")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--html", default="", help="writes the report of the optimized model")
    parser.add_argument("--trace", default="", help="writes its timeline for ui.perfetto.dev")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    words = torch.randint(0, 1000, (1, 128))
    source = BertModel(SIZES[arguments.size]).eval()
    before = xopt.profile(source, input_ids=words, steps=arguments.steps)
    model = xopt.optimize(source, dtype=getattr(torch, arguments.dtype))
    after = xopt.profile(model, input_ids=words, steps=arguments.steps)

    print(after)
    for name in before.categories | after.categories:
        milliseconds = [
            1e3 * taken.categories[name].seconds / taken.steps if name in taken.categories else 0.0
            for taken in (before, after)
        ]
        print(f"{name}: {milliseconds[0]:.2f} ms before, {milliseconds[1]:.2f} after")

    # A block of code instead of a model: whatever runs inside is one step.
    with xopt.profiler(roofs=False) as block, torch.inference_mode():
        model(input_ids=words)
    print(f"The block took {1e3 * block.wall_seconds:.2f} ms; {block.kernels[0].name} the most of it.")

    if arguments.html:
        after.to_html(arguments.html)
    if arguments.trace:
        after.trace(arguments.trace)


if __name__ == "__main__":
    main()
