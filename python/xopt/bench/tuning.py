"""How far the kernels' own heuristics are from the best choice: models of the bench, tuned and not, taking turns.

Each model is tuned (`xopt.tune`, its own cache unless --keep), and then runs by the heuristics and by what was found in
turns. A table has each shape for which something is clearly faster, another each model as a whole.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import xopt
from xopt.bench.errors import BenchError
from xopt.bench.model_cases import CASES
from xopt.bench.models import choose_cases
from xopt.bench.turns import Runner, take_turns

DEFAULT_CASES = "bert-base 1x128,vit-base 1,resnet50 1"
LEAST_ROUNDS = 15
SECONDS = 4.0
LIMIT = 1.05  # what the heuristics may take longer


@dataclass
class Result:
    case: str
    tuned: tuple[xopt.tuning.Tuned, ...]
    default_seconds: float
    seconds: float
    ratio: float
    """How many times as fast the tuned model is: the median over rounds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=DEFAULT_CASES, help="names or beginnings of names (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, help="threads (default: as many as torch uses)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of turns, for each way (default: %(default)s)")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: to try the bench itself")
    parser.add_argument("--keep", action="store_true", help="with the user's own cache of what was tuned")


def run(options: argparse.Namespace) -> None:
    if options.threads is not None:
        if options.threads < 1:
            raise BenchError(f"--threads: got {options.threads}, expected at least 1")
        torch.set_num_threads(options.threads)
    names = choose_cases(options.cases)
    with tempfile.TemporaryDirectory() as folder:
        if not options.keep:
            xopt.tuning.use_file(Path(folder) / "tuned.sqlite")
        try:
            results = [measure(name, options) for name in names]
        finally:
            xopt.tuning.use_file(None)
    _print(results)


def measure(name: str, options: argparse.Namespace) -> Result:
    case = CASES[name]
    torch.manual_seed(0)
    source = case.build(options.size == "tiny").eval()
    inputs = case.inputs(source)
    model = xopt.optimize(source, dtype=getattr(torch, options.dtype), inplace=True)
    report = xopt.tune(model, **inputs)
    runners = [Runner(way, _call(model, inputs, way), iter(int, 1)) for way in ("off", "use")]
    with torch.inference_mode():
        for runner in runners:
            runner.settle()
        take_turns(runners, LEAST_ROUNDS, options.seconds)
    default, tuned = (runner.samples for runner in runners)
    ratio = statistics.median(first / other for first, other in zip(default, tuned, strict=True))
    return Result(name, report.tuned, min(default), min(tuned), ratio)


def _call(model: Any, inputs: dict[str, Any], way: str) -> Any:
    def call(_: object) -> None:
        xopt.tuning.of_model(model).mode = way
        model(**inputs)

    return call


def _print(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120, highlight=False, markup=False)
    shapes = Table("case", "kernel", "size", "instance", "us", "times as fast", title="shapes with a clear winner")
    models = Table("case", "shapes", "with a winner", "heuristics ms", "tuned ms", "times as fast", "", title="models")
    for result in results:
        won = [each for each in result.tuned if not each.is_default]
        for each in won:
            name, seconds = f"{each.kernel}[{each.dtype}]", f"{each.seconds * 1e6:.0f}"
            shapes.add_row(result.case, name, each.size, each.instance, seconds, f"{each.gain:.2f}")
        counts = str(len(result.tuned)), str(len(won))
        times = f"{result.default_seconds * 1e3:.2f}", f"{result.seconds * 1e3:.2f}"
        within = "" if result.ratio <= LIMIT else f"more than {LIMIT - 1:.0%}"
        models.add_row(result.case, *counts, *times, f"{result.ratio:.3f}", within)
    if shapes.row_count:
        console.print(shapes)
    console.print(models)
