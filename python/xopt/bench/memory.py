"""Times whole models with and without a memory pool, and counts their page faults, in processes that take turns.

Three processes of each model: with malloc as it is, with libxopt_pool.so preloaded, and with xopt.runtime.memory_pool
in a process that has not preloaded it. Beside that they are alike, down to the cores. Every ratio is within one run.
On a machine that others use, too, take one thread: its CPU time does not count what they take of the core.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

import xopt
from xopt.bench import models, report
from xopt.bench.errors import BenchError
from xopt.bench.model_cases import CASES
from xopt.bench.model_process import Worker
from xopt.bench.model_results import Measured

MALLOC, PRELOADED, IN_PROCESS = "malloc", "pool, preloaded", "pool, in process"
_Number = TypeVar("_Number", int, float)
LEAST_SPEED = 0.98  # of malloc's: a pool that costs more is none
_DEFAULT_CASES = "sd-1.5 unet,sd vae decoder"


@dataclasses.dataclass
class Comparison:
    case: str
    model: str
    dtype: str
    allocators: list[Measured]

    def speed(self, allocator: Measured) -> float | None:
        """How many times as fast as with malloc, by the least times."""
        malloc = self.allocators[0]
        return malloc.minimum / allocator.minimum if malloc.was_timed and allocator.was_timed else None

    def cpu_speed(self, allocator: Measured) -> float | None:
        """The same by CPU time."""
        malloc = self.allocators[0]
        return _least(malloc.cpu_seconds) / _least(allocator.cpu_seconds) if self.speed(allocator) else None

    def too_slow(self) -> list[str]:
        """What is slower by the clock and by CPU time: either alone is also what others do to a shared machine."""
        slow = {}
        for each in self.allocators:
            speeds = [speed for speed in (self.speed(each), self.cpu_speed(each)) if speed is not None]
            if speeds and max(speeds) < LEAST_SPEED:
                slow[each.peer] = max(speeds)
        return [f"{self.case}, {self.model}, {self.dtype}: {name}, {speed:.2f}" for name, speed in slow.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=_DEFAULT_CASES, help="as of `models --list`; default: %(default)s")
    parser.add_argument("--models", default="eager,xopt", help="what runs them (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="cores (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each allocator (default: %(default)s)")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: to try the bench itself")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="writes everything measured")


def run(options: argparse.Namespace) -> None:
    if options.rounds < 1:
        raise BenchError(f"--rounds: got {options.rounds}, expected at least 1")
    names = _listed("--models", options.models, ("eager", "xopt"))
    dtypes = _listed("--dtypes", options.dtypes, ("float32", "bfloat16", "float16"))
    cases, cpus = models.choose_cases(options.cases), models.choose_cpus(options.threads)
    for library in sorted({CASES[case].library for case in cases}):
        if importlib.util.find_spec(library) is None:
            raise BenchError(f"the cases need {library}, which is not installed: pip install 'torch-xopt[bench]'")
    report.check_destinations(options.json, None)
    setting = {
        "machine": dataclasses.asdict(xopt.capabilities()),
        "torch": torch.__version__,
        "threads": len(cpus),
        "load_before": os.getloadavg()[0],
        "size": options.size,
    }
    print(f"{len(cpus)} threads, torch {torch.__version__}, load before {setting['load_before']:.1f}")
    compared: list[Comparison] = []
    for case in cases:
        for dtype in dtypes:
            for name in names:
                compared.append(compare(case, name, dtype, cpus, options.rounds, options.size == "tiny"))
                _print(compared[-1])
                if options.json is not None:  # also of a run that is interrupted later
                    rows = [dataclasses.asdict(each) for each in compared]
                    options.json.write_text(json.dumps({"kind": "memory", "setting": setting, "rows": rows}) + "\n")
    if options.size == "tiny":
        print("Tiny models: the times mean nothing.")
    else:
        slow = [line for comparison in compared for line in comparison.too_slow()]
        print("\n".join([f"BELOW {LEAST_SPEED} of malloc's speed:", *slow] if slow else [f"None below {LEAST_SPEED}."]))
    if any(each.error is not None for comparison in compared for each in comparison.allocators):
        raise BenchError("not everything was measured; the tables say what was not, and why")


def _listed(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise BenchError(f"{option}: got {name!r}, expected of: {', '.join(known)}")
    return names


def compare(case: str, model: str, dtype: str, cpus: list[int], rounds: int, tiny: bool) -> Comparison:
    preload = {"LD_PRELOAD": ":".join(filter(None, (os.environ.get("LD_PRELOAD"), str(xopt.runtime.POOL_LIBRARY))))}
    with contextlib.ExitStack() as processes, report.progress(3 + rounds) as advance:
        contenders = []
        for allocator in (MALLOC, PRELOADED, IN_PROCESS):
            advance(f"{case}: {allocator}")
            worker = Worker(allocator, **(preload if allocator == PRELOADED else {}))
            processes.callback(worker.close)
            contender = models.Contender(worker)
            request: dict[str, Any] = {"peer": model, "case": case, "dtype": dtype, "tiny": tiny}
            answer = contender.ask(do="set up", cpus=cpus, **request)
            if answer is not None:
                contender.measured.describe(answer)
            if allocator != MALLOC and contender.goes_on:
                contender.measured.note = (contender.ask(do="keep") or {"backend": ""})["backend"]
            contenders.append(contender)
        models.take_turns(contenders, rounds, False, lambda: advance(f"{case}, {model}, {dtype}"))
    return Comparison(case, model, dtype, [contender.measured for contender in contenders])


def _print(comparison: Comparison) -> None:
    table = Table(title=f"{comparison.case}, {comparison.model}, {comparison.dtype}", title_justify="left")
    table.add_column("")
    for header in ("page faults a forward", "least ms", "median ms", "speed over malloc", "CPU ms", "by CPU time"):
        table.add_column(header, justify="right")
    for each in comparison.allocators:
        if not each.was_timed:
            table.add_row(each.peer, f"not measured: {each.error}")
            continue
        ratios = [comparison.speed(each), comparison.cpu_speed(each)]
        speed, cpu_speed = ("-" if ratio is None or each.peer == MALLOC else f"{ratio:.2f}x" for ratio in ratios)
        times = (f"{1e3 * seconds:.1f}" for seconds in (each.minimum, each.median, _least(each.cpu_seconds)))
        least, median, cpu = times
        table.add_row(each.peer, f"{_least(each.page_faults)}", least, median, speed, cpu, cpu_speed)
    Console(width=None if Console().is_terminal else report.TABLE_WIDTH).print(table)


def _least(turns: Sequence[Sequence[_Number]]) -> _Number:
    return min(number for turn in turns for number in turn)
