"""Runs single kernels of a profile by themselves, hot and cold in cache, and looks whether another one is faster.

Takes what `xopt-profile --json` or `--trace` wrote. Each kernel runs on random values of the recorded shapes, dtypes
and strides: as it was recorded, against oneDNN's or torch's for the same work, and with --all-instances at each level
that this build has it for and by each blocking that autotuning would try. Hot: the same operands again and again. Cold:
operands that take turns over more memory than the caches hold. All contenders take turns in one process; those that
compute the same have to agree first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import xopt
from xopt import _C
from xopt.bench.errors import BenchError, UnavailableError, WrongResultError
from xopt.bench.replay_contender import RECORDED, Contender
from xopt.bench.replay_contenders import contenders_of
from xopt.bench.rotation import known_caches, outputs_kept_mapped, plan_rotation
from xopt.bench.turns import Runner, take_turns

MOST_KERNELS = 10
MOST_COPIES = 256
SECONDS = 0.1
LEAST_ROUNDS = 5
TOLERANCES = {"f32": 1e-3, "bf16": 5e-2, "f16": 1e-2}
FASTER = 1.05  # less is not told from chance


@dataclass
class LevelRunner(Runner):
    """A contender whose kernels are chosen as if the CPU had no more than a level, or otherwise than by heuristics."""

    level: str | None = None
    choice: tuple[int, ...] | None = None

    def run(self, calls: int) -> float:
        with as_chosen(self):
            return super().run(calls)


@contextmanager
def at_level(level: str | None) -> Iterator[None]:
    before = _C.active_isa()
    _C.cap_isa(level or before)
    try:
        yield
    finally:
        _C.cap_isa(before)


@contextmanager
def as_chosen(one: LevelRunner | Contender) -> Iterator[None]:
    with at_level(one.level), nullcontext() if one.choice is None else xopt.tuning.forced(one.choice):
        yield


@dataclass
class Replayed:
    """Seconds of a call by contender: the fastest round."""

    name: str
    module: str | None
    recorded_seconds: float
    """In the profile."""
    hot: dict[str, float] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)
    cold_source: str = ""
    """Where cold operands come from."""
    failures: dict[str, str] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    """How many times as fast as what ran, cold, those are that compute the same: the lesser of the ratio of the fastest
    times and the median over rounds."""

    def verdict(self) -> str:
        """Whether another one is faster, in words."""
        if RECORDED not in self.cold:
            return f"{self.name}: {self.failures.get(RECORDED, 'was not run')}"
        best = max(self.gains, key=self.gains.__getitem__, default=RECORDED)
        if self.gains.get(best, 1.0) < FASTER:
            return f"{self.name}: none is faster than what ran"
        return f"{self.name}: {best} is {self.gains[best]:.2f} times as fast as what ran"


def read_kernels(path: Path) -> list[dict[str, Any]]:
    """The kernels of a profile or of a trace, by time; those that are no operator left out."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: {error}") from error
    found = content.get("xopt", content) if isinstance(content, dict) else {}
    if not isinstance(found.get("kernels"), list):
        raise BenchError(f"{path}: expected what xopt-profile --json or --trace wrote")
    return [kernel for kernel in found["kernels"] if kernel["operator"] and kernel["category"] != "allocation"]


def choose(kernels: Sequence[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    if name is None:
        return list(kernels[:MOST_KERNELS])
    found = [kernel for kernel in kernels if name in kernel["name"]]
    if not found:
        known = ", ".join(dict.fromkeys(kernel["name"] for kernel in kernels[:MOST_KERNELS]))
        raise BenchError(f"--kernel: no kernel's name contains '{name}'; the first are: {known}")
    return found


def replay(kernel: dict[str, Any], all_instances: bool, seconds: float = SECONDS) -> Replayed:
    own = kernel["own_seconds"] / kernel["calls"]
    result = Replayed(kernel["name"], kernel["module"], own)
    with torch.inference_mode(), outputs_kept_mapped():
        ready = _agreeing(kernel, contenders_of(kernel, all_instances), result)
        operands = max((_bytes_of(one.make()) for one in ready), default=0)
        rotation = plan_rotation(max(operands, 1), known_caches(), torch.get_num_threads())
        copies = min(rotation.copies, MOST_COPIES)
        result.cold_source = rotation.source if copies == rotation.copies else f"{copies} copies"
        for times, count in ((result.hot, 1), (result.cold, copies)):
            runners = [_runner(one, count) for one in ready]
            for runner in runners:
                runner.settle()
            take_turns(runners, LEAST_ROUNDS, seconds)
            times.update({runner.name: min(runner.samples) for runner in runners})
        same = {one.name for one in ready if one.same_result} - {RECORDED}
        result.gains = _gains({runner.name: runner.samples for runner in runners}, same)
    return result


def _gains(samples: dict[str, list[float]], names: set[str]) -> dict[str, float]:
    if RECORDED not in samples:
        return {}
    ours, gains = samples[RECORDED], {}
    for name in samples.keys() & names:
        rounds = statistics.median(first / other for first, other in zip(ours, samples[name], strict=True))
        gains[name] = min(rounds, min(ours) / min(samples[name]))
    return gains


def _runner(contender: Contender, count: int) -> LevelRunner:
    operands = itertools.cycle([contender.make() for _ in range(count)])
    instance: Any = {"level": contender.level, "choice": contender.choice}
    return LevelRunner(name=contender.name, call=contender.run, weights=operands, **instance)


def _agreeing(kernel: dict[str, Any], contenders: Sequence[Contender], result: Replayed) -> list[Contender]:
    """Those that run, and compute what the recorded one does where they say so."""
    ready: list[Contender] = []
    reference: torch.Tensor | None = None
    for contender in contenders:
        try:
            with as_chosen(contender):
                result_of_it = _first(contender.run(contender.make()))
            if contender.name == RECORDED:
                reference = result_of_it
            elif contender.same_result and reference is not None:
                _check_alike(result_of_it, reference, kernel["dtype"])
        except (UnavailableError, WrongResultError, RuntimeError, TypeError, ValueError) as error:
            result.failures[contender.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        ready.append(contender)
    return ready


def _first(result: Any) -> torch.Tensor:
    first = result[0] if isinstance(result, (tuple, list)) else result
    assert isinstance(first, torch.Tensor)
    return first


def _check_alike(result: torch.Tensor, reference: torch.Tensor, dtype: str) -> None:
    if result.shape != reference.shape:
        raise WrongResultError(f"a result of shape {list(result.shape)} instead of {list(reference.shape)}")
    if not reference.is_floating_point():
        return
    error = (result.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30)
    if not error <= TOLERANCES.get(dtype, 5e-2):
        raise WrongResultError(f"is off what was recorded by {error:.2g}")


def _bytes_of(operands: Any) -> int:
    if isinstance(operands, torch.Tensor):
        return operands.numel() * operands.element_size()
    if isinstance(operands, dict):
        operands = list(operands.values())
    return sum(map(_bytes_of, operands)) if isinstance(operands, (tuple, list)) else 0


# ---- The command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, help="what xopt-profile --json or --trace wrote")
    parser.add_argument(
        "--kernel", metavar="NAME", help=f"those whose name contains it (default: first {MOST_KERNELS})"
    )
    parser.add_argument("--all-instances", action="store_true", help="at each level and by each blocking there is")
    parser.add_argument("--threads", type=int, help="threads (default: as many as torch uses)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for a contender (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes what was measured")


def run(options: argparse.Namespace) -> None:
    if options.threads is not None:
        if options.threads < 1:
            raise BenchError(f"--threads: got {options.threads}, expected at least 1")
        torch.set_num_threads(options.threads)
    chosen = choose(read_kernels(options.profile), options.kernel)
    results = [replay(kernel, options.all_instances, options.seconds) for kernel in chosen]
    _print(results)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def _print(results: Sequence[Replayed]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140, highlight=False, markup=False)
    for result in results:
        table = Table(title=f"{result.name}  {result.module or ''}", title_justify="left")
        for header in ("contender", "hot us", "cold us", "cold, of what ran"):
            table.add_column(header, justify="left" if header == "contender" else "right")
        table.add_row("in the profile", "", f"{result.recorded_seconds * 1e6:.1f}", "")
        recorded = result.cold.get(RECORDED)
        for name, seconds in result.cold.items():
            ratio = f"{seconds / recorded:.2f}" if recorded else ""
            table.add_row(name, f"{result.hot[name] * 1e6:.1f}", f"{seconds * 1e6:.1f}", ratio)
        for name, reason in result.failures.items():
            table.add_row(name, "", "", reason)
        console.print(table)
    for result in results:
        console.print(f"- {result.verdict()} (cold operands from {result.cold_source})")
