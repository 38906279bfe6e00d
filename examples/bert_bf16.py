"""A Hugging Face BERT in bf16: optimized by one line, compared with torch's own bf16 and fp32.

    python examples/bert_bf16.py [--size base|tiny] [--batch 1] [--tokens 128] [--rounds 20]

The model is made from its configuration with random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel

import xopt

SIZES = {
    "base": BertConfig(),
    "tiny": BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="BERT in bf16, optimized by xopt, against torch alone.")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = BertModel(SIZES[arguments.size]).eval()
    words = torch.randint(0, model.config.vocab_size, (arguments.batch, arguments.tokens))

    started = time.perf_counter()
    optimized = xopt.optimize(model, dtype=torch.bfloat16)
    seconds = time.perf_counter() - started
    print(xopt.report(optimized))
    print(f"optimize() took {seconds:.2f} s; {torch.get_num_threads()} threads.")

    contenders = {"torch, fp32": model, "torch, bf16": copy.deepcopy(model).bfloat16(), "xopt, bf16": optimized}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.inference_mode():
        answers = {name: contender(words).last_hidden_state for name, contender in contenders.items()}
        for _ in range(arguments.rounds):  # in turns: a shared machine is not as fast in one minute as in the next
            for name, contender in contenders.items():
                started = time.perf_counter()
                contender(words)
                times[name].append(time.perf_counter() - started)

    exact = answers["torch, fp32"]
    best = min(times["xopt, bf16"])
    table = Table("", "least ms", "median ms", "xopt is faster by", "relative error")
    for name, taken in times.items():
        error = float((answers[name].float() - exact).norm() / exact.norm())
        milliseconds = (f"{1e3 * min(taken):.2f}", f"{1e3 * statistics.median(taken):.2f}")
        table.add_row(name, *milliseconds, f"{min(taken) / best:.2f}x", f"{error:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
