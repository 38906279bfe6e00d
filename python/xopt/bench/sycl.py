"""The kernels of BERT-base on a SYCL device against those of the CPU, and what building them costs.

Both take turns in one process, on tensors of the CPU; a time on the device ends with the host's wait for it. Building
is measured in two processes with a cache of their own on disk: the first compiles, the second reads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch

import xopt
from xopt.bench.errors import BenchError
from xopt.bench.turns import make_runner, take_turns

Call = Callable[[], object]

_HIDDEN, _INNER, _HEADS = 768, 3072, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, or a number of python -m xopt (default: cpu)")
    parser.add_argument("--rows", type=int, default=128, help="tokens (default: 128)")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each kernel gets at least (default: 5)")
    parser.add_argument("--no-builds", action="store_true", help="leave out what building costs")


def run(options: argparse.Namespace) -> None:
    if not xopt.sycl.available():
        raise BenchError("sycl: the SYCL part is not there; get it by `make xpu`")
    with torch.no_grad():
        device = xopt.sycl.device(options.device)
        tile = device.tile("bf16")
        units = "matrix units" if tile.matrix else "vectors (no matrix units: the plain tiles)"
        print(f"device {options.device}: bf16 on {units}, tiles {tile.rows}x{tile.columns}x{tile.depth}")
        print(f"{'kernel':34} {'CPU ms':>9} {'SYCL ms':>9} {'CPU is faster by':>17}")
        for name, call in bert_kernels(options.rows).items():
            on_cpu, on_device = measure(call, device, options.rounds)
            print(f"{name:34} {on_cpu * 1e3:9.3f} {on_device * 1e3:9.3f} {on_device / on_cpu:17.2f}", flush=True)
    if not options.no_builds:
        print_builds(options.device)


def bert_kernels(rows: int) -> dict[str, Call]:
    """The calls of a layer of BERT-base in bf16."""
    ops, dtype = torch.ops.xopt, torch.bfloat16

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    def packed(out_features: int, in_features: int) -> torch.Tensor:
        return torch.as_tensor(ops.linear_pack(rand(out_features, in_features) / in_features**0.5, dtype=dtype))

    x, inner = rand(rows, _HIDDEN), rand(rows, _INNER)
    merged, up, down = packed(3 * _HIDDEN, _HIDDEN), packed(_INNER, _HIDDEN), packed(_HIDDEN, _INNER)
    heads = [rand(1, rows, _HEADS, _HIDDEN // _HEADS).transpose(1, 2) for _ in range(3)]
    weight, bias = torch.ones(_HIDDEN), torch.zeros(_INNER)
    normed = {"norm_weight": weight, "norm_bias": bias[:_HIDDEN]}
    return {
        f"linear {rows}x{3 * _HIDDEN}x{_HIDDEN}": lambda: ops.linear(x, merged, 3 * _HIDDEN),
        f"linear+gelu {rows}x{_INNER}x{_HIDDEN}": lambda: ops.linear(x, up, _INNER, bias, activation="gelu_erf"),
        f"linear+norm {rows}x{_HIDDEN}x{_INNER}": lambda: ops.linear_norm(inner, down, _HIDDEN, None, x, **normed),
        f"attention 1x{_HEADS}x{rows}x{rows}x{_HIDDEN // _HEADS}": lambda: ops.attention(*heads),
        f"layer_norm {rows}x{_HIDDEN}": lambda: ops.layer_norm(x, weight),
    }


def measure(call: Call, device: xopt.sycl.device, rounds: int) -> tuple[float, float]:
    """Least seconds of a call, on the CPU and on the device."""

    def on_device() -> object:
        with device:
            return call()

    runners = [make_runner("cpu", lambda _: call(), [None]), make_runner("sycl", lambda _: on_device(), [None])]
    for runner in runners:
        runner.settle()
    take_turns(runners, rounds, 1.0)
    return min(runners[0].samples), min(runners[1].samples)


_BUILD = """
import json, sys, torch, xopt
from xopt.bench.sycl import bert_kernels
with torch.no_grad(), xopt.sycl.device(sys.argv[1]) as device:
    for call in bert_kernels(8).values():
        call()
print(json.dumps(vars(device.builds())))
"""


def print_builds(device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for what in ("compiled", "read from disk"):
            environment = {**os.environ, "XDG_CACHE_HOME": folder}
            done = subprocess.run(
                [sys.executable, "-c", _BUILD, device], capture_output=True, text=True, env=environment
            )
            if done.returncode:
                raise BenchError(f"sycl: building failed:\n{done.stderr}")
            builds = json.loads(done.stdout)
            seconds = builds["compile_seconds"] + builds["read_seconds"]
            print(f"the {builds['compiled'] + builds['read']} programs of BERT {what}: {seconds:.3f} s")
