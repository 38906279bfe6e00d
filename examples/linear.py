"""A linear layer with bias and gelu in one pass, beside the same in plain torch.

python examples/linear.py
"""

import time
from collections.abc import Callable

import torch

import xopt  # noqa: F401  registers torch.ops.xopt


def milliseconds(call: Callable[[], torch.Tensor], rounds: int = 50) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def main() -> None:
    rows, out_features, in_features = 128, 3072, 768
    weight = torch.randn(out_features, in_features).bfloat16()
    bias = torch.randn(out_features).bfloat16()
    x = torch.randn(rows, in_features).bfloat16()
    packed = torch.ops.xopt.linear_pack(weight, dtype=torch.bfloat16)

    def fused() -> torch.Tensor:
        y: torch.Tensor = torch.ops.xopt.linear(x, packed, out_features, bias, activation="gelu_erf")
        return y

    def plain() -> torch.Tensor:
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))

    with torch.inference_mode():
        reference = torch.nn.functional.gelu(torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
        for name, call in (("xopt", fused), ("torch", plain)):
            error = (call().double() - reference).abs().max().item()
            print(f"{name:6} {milliseconds(call):7.3f} ms   largest error {error:.3g}")


if __name__ == "__main__":
    main()
