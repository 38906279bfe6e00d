"""Times whole models: xopt against torch eager, torch.compile, OpenVINO and IPEX, in processes that take turns.

Each contender runs in a process of its own with the same model, inputs and cores. Times are of one forward, or of one
token where the case decodes. Every ratio is between contenders of the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from xopt.bench import model_peers, model_report
from xopt.bench.errors import BenchError
from xopt.bench.model_cases import CASES
from xopt.bench.model_report import CaseResult, Measured

TURN_SECONDS = 0.05  # of calls in a turn, at least one
PAUSE_SECONDS = 0.02  # until the threads of the one before have gone to sleep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", help="names or beginnings of names, with commas between; default: all")
    parser.add_argument("--peers", default="eager,compile,openvino", help="default: %(default)s; also known: ipex")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="each contender's cores (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: to try the bench itself")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="a chart of the speedups over each peer")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")


def run(options: argparse.Namespace) -> None:
    if options.list:
        print("\n".join(CASES))
        return
    cases = choose_cases(options.cases)
    cpus = choose_cpus(options.threads)
    peers, missing = choose_peers(options.peers)
    if options.png is not None:
        model_report.check_plotting()
    report = model_report.ModelReport(options.dtype, options.threads, options.size, missing)
    report.begin()
    for name in cases:
        report.add(measure(name, [model_peers.OURS, *peers], options, cpus))
    report.end()
    if options.json is not None:
        options.json.write_text(json.dumps(dataclasses.asdict(report), indent=2))
    if options.png is not None:
        report.draw(options.png)


def choose_cases(text: str | None) -> list[str]:
    if not text:
        return list(CASES)
    chosen = []
    for asked in text.split(","):
        found = [name for name in CASES if name.startswith(asked.strip())]
        if not found:
            raise BenchError(f"no case begins with {asked!r}; there are: {', '.join(CASES)}")
        chosen += found
    return list(dict.fromkeys(chosen))


def choose_peers(text: str) -> tuple[list[str], list[str]]:
    """Those that are installed, and those that are not."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    known = [name for name in model_peers.PEERS if name != model_peers.OURS]
    for name in asked:
        if name not in known:
            raise BenchError(f"unknown peer {name!r}; there are: {', '.join(known)}")
    return [n for n in asked if model_peers.is_installed(n)], [n for n in asked if not model_peers.is_installed(n)]


def choose_cpus(threads: int) -> list[int]:
    """One logical CPU of each core, as far as they go."""
    allowed = sorted(os.sched_getaffinity(0))
    first_of_core: dict[str, int] = {}
    for cpu in allowed:
        siblings = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        first_of_core.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    order = [*first_of_core.values(), *(cpu for cpu in allowed if cpu not in first_of_core.values())]
    if not 1 <= threads <= len(order):
        raise BenchError(f"--threads {threads}: expected 1 to {len(order)}, the CPUs that this process may use")
    return order[:threads]


class Worker:
    """A contender's process, and what became of it."""

    def __init__(self, peer: str) -> None:
        self.measured = Measured(peer)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "xopt.bench.model_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @property
    def is_alive(self) -> bool:
        return self.measured.error is None

    def ask(self, **request: Any) -> dict[str, Any] | None:
        """The answer; None where it failed, which `measured.error` then tells."""
        requests: IO[str] | None = self._process.stdin
        answers: IO[str] | None = self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.measured.error = f"its process ended with status {self._process.wait()}"
            return None
        answer: dict[str, Any] = json.loads(line)
        self.measured.error = answer.get("error")
        return answer if self.is_alive else None

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(case: str, peers: Sequence[str], options: argparse.Namespace, cpus: list[int]) -> CaseResult:
    workers: list[Worker] = []
    try:
        for peer in peers:
            worker = Worker(peer)
            workers.append(worker)
            request = {"peer": peer, "case": case, "dtype": options.dtype, "tiny": options.size == "tiny"}
            # Set up one after the other: set-up times are compared, too.
            answer = worker.ask(do="set up", cpus=cpus, **request)
            if answer is not None:
                worker.measured.describe(answer)
        take_turns([worker for worker in workers if worker.is_alive], options.rounds)
    finally:
        for worker in workers:
            worker.close()
    return CaseResult(case, CASES[case].decodes, [worker.measured for worker in workers])


def take_turns(workers: Sequence[Worker], rounds: int) -> None:
    calls = {}
    for worker in workers:
        answer = worker.ask(do="run", calls=2)
        if answer is not None:
            calls[worker] = max(1, round(TURN_SECONDS / max(1e-6, min(answer["seconds"]))))
    for _ in range(rounds):
        for worker in filter(lambda worker: worker.is_alive, workers):
            time.sleep(PAUSE_SECONDS)
            answer = worker.ask(do="run", calls=calls[worker])
            if answer is not None:
                worker.measured.turns.append(answer["seconds"])
