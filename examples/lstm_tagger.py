"""A tagger (embeddings, a bidirectional LSTM, a linear layer) over sentences of different lengths, in fp32 and bf16.

    python examples/lstm_tagger.py [--size full|tiny] [--batch 8] [--words 60] [--rounds 20]

The sentences go through the LSTM as packed sequences, so no time is spent on padding.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import xopt

SIZES = {"full": {"features": 300, "units": 256, "layers": 2}, "tiny": {"features": 24, "units": 20, "layers": 2}}
VOCABULARY, TAGS = 5000, 17


class Tagger(nn.Module):
    def __init__(self, features: int, units: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, features)
        self.context = nn.LSTM(features, units, layers, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(2 * units, TAGS)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.context(packed)
        padded, _ = pad_packed_sequence(hidden, batch_first=True)
        return self.tags(padded)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description="An LSTM tagger, optimized by xopt, against torch alone.")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--words", type=int, default=60, help="of the longest sentence")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    source = Tagger(**SIZES[arguments.size]).eval()
    words = torch.randint(0, VOCABULARY, (arguments.batch, arguments.words))
    lengths = torch.randint(1, arguments.words + 1, (arguments.batch,))
    lengths[0] = arguments.words

    contenders = {
        "torch, fp32": source,
        "xopt, fp32": xopt.optimize(source, dtype=torch.float32),
        "torch, bf16": copy.deepcopy(source).bfloat16(),
        "xopt, bf16": xopt.optimize(source, dtype=torch.bfloat16),
    }
    least = dict.fromkeys(contenders, float("inf"))
    with torch.no_grad():
        answers = {name: contender(words, lengths).float() for name, contender in contenders.items()}
        for _ in range(arguments.rounds):  # in turns: a shared machine is not as fast in one minute as in the next
            for name, contender in contenders.items():
                started = time.perf_counter()
                contender(words, lengths)
                least[name] = min(least[name], time.perf_counter() - started)

    print(xopt.report(contenders["xopt, bf16"]))
    exact = answers["torch, fp32"]
    for name, seconds in least.items():
        error = float((answers[name] - exact).norm() / exact.norm())
        print(f"{name}: {1e3 * seconds:.2f} ms, {lengths.sum() / seconds:.0f} words a second, differs by {error:.1e}")


if __name__ == "__main__":
    main()
