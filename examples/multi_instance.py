"""Throughput of BERT in bf16 by several instances of this script, each on cores of its own.

xopt-launch --ninstances 2 --benchmark examples/multi_instance.py

--benchmark adds up what the instances tell by xopt.launch.report. One instance with all cores, for comparison:

xopt-launch --benchmark examples/multi_instance.py
"""

import argparse
import os
import time

import torch
from transformers import BertConfig, BertModel

import xopt
import xopt.launch

SIZES = {"base": BertConfig(), "tiny": BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of BERT in bf16.")
    parser.add_argument("--size", choices=sorted(SIZES), default="base")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = xopt.optimize(BertModel(SIZES[options.size]).eval(), dtype=torch.bfloat16)
    words = torch.randint(0, 1000, (options.batch, options.tokens))
    with torch.inference_mode():
        model(words)  # blocks are fused when they are first called
        forwards, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < options.seconds or forwards == 0:
            model(words)
            forwards += 1
    cores = os.environ.get("XOPT_LAUNCH_CPUS", "of the system's choice")
    print(f"{forwards} forwards by {torch.get_num_threads()} threads on CPUs {cores}")
    xopt.launch.report(throughput=forwards * options.batch / elapsed, latency_ms=elapsed / forwards * 1e3)


if __name__ == "__main__":
    main()
