"""`xopt-launch tune`: runs a script with different instances, allocators and OpenMP settings, and writes the best down.

One thing is varied after the other, each from the best so far, most important first: how many instances there are, the
allocator, siblings, how threads are bound, the OpenMP runtime. What the command line says is not varied. A trial is a
run of the script to its end, with all cores in use.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xopt.launch import configuration, libraries, measure, openmp, options, placement, process, topology
from xopt.launch.allocator import available
from xopt.launch.build import build_plan
from xopt.launch.errors import LaunchError
from xopt.launch.output import say
from xopt.launch.plan import Plan

Settings = dict[str, Any]

_EXAMPLE = "examples:\n  xopt-launch tune --budget 600 script.py\n  xopt-launch --config xopt-launch.json script.py\n"


# What is less of a gain may be none, and the simpler setting is kept.
_NOISE = 0.02


@dataclass(frozen=True)
class Trial:
    options: Settings
    status: int
    seconds: float
    score: float | None
    """Higher is better; None: it failed."""


def main(arguments: Sequence[str]) -> int:
    parser = options.build_parser(prog="xopt-launch tune", examples=_EXAMPLE)
    group = parser.add_argument_group("tuning")
    group.add_argument("--budget", type=float, default=300.0, metavar="SECONDS", help="time for it all (default: 300)")
    group.add_argument(
        "--objective",
        choices=("throughput", "latency"),
        default="throughput",
        help="what scripts tell by xopt.launch.report; of one that tells no throughput, runs a second are counted",
    )
    group.add_argument(
        "--write", type=Path, default=Path("xopt-launch.json"), metavar="FILE", help="the file for --config"
    )
    chosen = configuration.parse(parser, arguments)
    options.check(chosen)
    _check(chosen)
    return _Tuning(chosen).run()


def _check(chosen: argparse.Namespace) -> None:
    for name in ("dry_run", "benchmark", "json", "log_dir", "instance_idx", "nproc_per_node", "nnodes"):
        if getattr(chosen, name):
            raise LaunchError(f"--{name.replace('_', '-')}: not while tuning")
    if not chosen.budget > 0:
        raise LaunchError(f"--budget: expected more than 0 seconds, got {chosen.budget}")


class _Tuning:
    def __init__(self, chosen: argparse.Namespace) -> None:
        self._chosen = chosen
        self._started = time.monotonic()
        self._trials: list[Trial] = []

    def run(self) -> int:
        """The launcher's exit status."""
        status = 0
        planned: list[Any] = []
        for candidate in self._candidates():
            plan = self._with(candidate).as_data()["instances"]
            if plan in planned:  # this setting changes nothing here
                continue
            planned.append(plan)
            if not self._has_time():
                say(f"the budget of {self._chosen.budget:g} s is used up; not everything was tried")
                break
            status = self._try(candidate)
            if status:
                break
        best = self._best()
        if best is None:
            say("error: no trial has come to its end; nothing was written")
            return status or 1
        self._write(best)
        return status

    # ---- What is tried ----------------------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Settings]:
        """Asked for one at a time: what comes later starts from the best until then."""
        for variations in (self._instances(), self._allocators(), self._siblings(), self._threads(), self._runtimes()):
            best = self._best()
            start = {} if best is None else best.options
            for variation in variations:
                yield {**start, **variation}

    def _is_open(self, *names: str) -> bool:
        """Nothing of it is said on the command line."""
        defaults = options.build_parser()
        return all(getattr(self._chosen, name) == defaults.get_default(name) for name in names)

    def _instances(self) -> list[Settings]:
        if not self._is_open("ninstances", "ncores_per_instance", "latency_mode", "throughput_mode", "oversubscribe"):
            return [{}]
        placed = placement.place(topology.read_own(), options.request(self._chosen))
        cores = sum(instance.threads for instance in placed.instances)
        numbers = [number for number in range(1, cores + 1) if cores % number == 0]
        return [{"ninstances": number, "ncores-per-instance": cores // number} for number in numbers]

    def _allocators(self) -> list[Settings]:
        if not self._is_open("memory_allocator"):
            return []
        return [{"memory-allocator": name} for name in available(libraries.directories(os.environ))]

    def _siblings(self) -> list[Settings]:
        """Both threads of each core, in as many instances: each has twice the threads then."""
        best = self._best()
        machine = topology.read_own()
        everywhere = all(len(core.cpus) == 2 for core in machine.cores)
        size = "ncores-per-instance"
        if best is None or size not in best.options or not everywhere or not self._is_open("use_logical_cores"):
            return []
        return [{"use-logical-cores": True, size: 2 * best.options[size]}]

    def _threads(self) -> list[Settings]:
        return [{"bind-threads": False}] if self._is_open("bind_threads") else []

    def _runtimes(self) -> list[Settings]:
        try:
            openmp.choose("intel", os.environ, libraries.directories(os.environ), openmp.torch_directory())
        except LaunchError:
            return []  # it is not installed
        return [{"omp-runtime": "intel"}] if self._is_open("omp_runtime") else []

    # ---- Trials -----------------------------------------------------------------------------------------------------

    def _has_time(self) -> bool:
        """Whether one more trial, of the length of the last, would end within the budget. The first always may."""
        used = time.monotonic() - self._started
        return not self._trials or used + self._trials[-1].seconds <= self._chosen.budget

    def _with(self, candidate: Settings, logs: Path | None = None) -> Plan:
        changed = {name.replace("-", "_"): value for name, value in candidate.items()}
        return build_plan(argparse.Namespace(**{**vars(self._chosen), **changed, "log_dir": logs}))

    def _try(self, candidate: Settings) -> int:
        """Returns the exit status for the launcher to end with now, or 0."""
        with tempfile.TemporaryDirectory(prefix="xopt-launch-") as folder:
            made = self._with(candidate, Path(folder))
            manner = process.Manner(grace_seconds=self._chosen.grace_period, say=lambda message: None)
            start = time.monotonic()
            result = process.run(made.instances, manner)
            seconds = time.monotonic() - start
            measure.read_logs(result.measured, made.instances)
            score = None if result.status else self._score(measure.as_data(result.measured))
            self._trials.append(Trial(candidate, result.status, seconds, score))
            self._tell(self._trials[-1])
            if result.signal:
                return 128 + result.signal
            if result.status and len(self._trials) == 1:
                failed = next(one for one in result.measured if one.status == result.status)
                log = made.instances[failed.index].log
                say("error: the script fails:\n" + (log.read_text(errors="replace")[-2000:] if log else ""))
                return result.status
        return 0

    def _score(self, data: dict[str, Any]) -> float:
        total = data["total"]
        if self._chosen.objective == "latency":
            if total["latency_ms_mean"] is None:
                raise LaunchError("--objective latency: the script tells none by xopt.launch.report(latency_ms=...)")
            return -float(total["latency_ms_mean"])
        if total["throughput"] is not None:
            return float(total["throughput"])
        return float(sum(1 / one["wall_seconds"] for one in data["instances"]))

    def _tell(self, trial: Trial) -> None:
        used = time.monotonic() - self._started
        said = ", ".join(f"{name} {value}" for name, value in trial.options.items()) or "as the command line says"
        best = self._best()
        result = f"failed with {trial.status}" if trial.score is None else f"{abs(trial.score):.4g}"
        mark = " (best)" if trial is best and len(self._trials) > 1 else ""
        say(f"[{used:.0f} of {self._chosen.budget:g} s] {said}: {result}{mark}")

    def _best(self) -> Trial | None:
        best: Trial | None = None
        for trial in self._trials:
            if trial.score is None:
                continue
            if best is None or best.score is None or trial.score > best.score + _NOISE * abs(best.score):
                best = trial
        return best

    def _write(self, best: Trial) -> None:
        content = {
            "options": best.options,
            "objective": self._chosen.objective,
            "trials": [
                {"options": trial.options, "status": trial.status, "seconds": trial.seconds, "score": trial.score}
                for trial in self._trials
            ],
        }
        try:
            self._chosen.write.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise LaunchError(f"--write: cannot write {self._chosen.write}: {error.strerror}") from error
        say(f"wrote the best of {len(self._trials)} trials: xopt-launch --config {self._chosen.write} ...")
