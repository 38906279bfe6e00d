"""Times whole models: xopt against torch eager, torch.compile, OpenVINO and IPEX, in processes that take turns.

Each contender runs in a process of its own with the same model, inputs and cores. Times are of one forward, or of one
token where the case decodes. Every ratio is between contenders of the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from xopt.bench import model_peers, model_report, report
from xopt.bench.errors import BenchError
from xopt.bench.model_cases import CASES
from xopt.bench.model_process import ContenderError, Crew, Worker
from xopt.bench.model_results import CaseResult, Measured, Plan
from xopt.bench.turns import SLOW_CALL_SECONDS

TURN_SECONDS = 0.05  # of calls in a turn, at least one
PAUSE_SECONDS = 0.02  # until the threads of the one before have gone to sleep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", help="names or beginnings of names, with commas between; default: all")
    parser.add_argument("--peers", default="eager,compile,openvino", help="default: %(default)s; also known: ipex")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="each contender's cores (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: to try the bench itself")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="writes everything measured")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="a chart of the speedups over each peer")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")


def make_plan(options: argparse.Namespace) -> Plan:
    if options.rounds < 1:
        raise BenchError(f"--rounds: got {options.rounds}, expected at least 1")
    peers, missing = choose_peers(options.peers)
    return Plan(
        cases=choose_cases(options.cases),
        peers=peers,
        missing=missing,
        dtype=options.dtype,
        cpus=choose_cpus(options.threads),
        rounds=options.rounds,
        size=options.size,
    )


def run(options: argparse.Namespace) -> None:
    if options.list:
        print("\n".join(CASES))
        return
    plan = make_plan(options)
    report.check_destinations(options.json, None)
    model_report.check_chart(options.png)
    for library in sorted({CASES[name].library for name in plan.cases}):
        if importlib.util.find_spec(library) is None:
            raise BenchError(f"the cases need {library}, which is not installed: pip install 'torch-xopt[bench]'")
    findings = model_report.ModelReport(plan, os.getloadavg()[0])
    findings.begin()
    with Crew() as crew:
        for name in plan.cases:
            findings.add(measure(name, plan, crew))
            if options.json is not None:  # also of a run that is interrupted later
                findings.write(options.json)
            if plan.size == "full":  # what one case leaves behind would count as memory of the next
                crew.dismiss()
    findings.end()
    if options.png is not None:
        findings.draw(options.png)
    failed = [result.case for result in findings.results if result.ours is None]
    if failed:
        raise BenchError(f"xopt has no time in: {', '.join(failed)}")


def choose_cases(text: str | None) -> list[str]:
    if not text:
        return [name for name, case in CASES.items() if not case.only_by_name]
    chosen = []
    for asked in text.split(","):
        whole = [name for name in CASES if name == asked.strip()]
        found = whole or [name for name in CASES if name.startswith(asked.strip())]
        if not found:
            raise BenchError(f"no case begins with {asked!r}; there are: {', '.join(CASES)}")
        chosen += found
    return list(dict.fromkeys(chosen))


def choose_peers(text: str) -> tuple[list[str], list[str]]:
    """Those that are installed, and those that are not."""
    asked = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
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


class Contender:
    """A worker in one case, and what became of it there: after an error it is asked nothing more."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.measured = Measured(worker.peer)
        self.calls, self.warm_up = 1, False

    @property
    def goes_on(self) -> bool:
        return self.measured.error is None

    def ask(self, **request: Any) -> dict[str, Any] | None:
        """The answer; None where it failed, which `measured.error` then tells."""
        try:
            return self._worker.ask(**request)
        except ContenderError as error:
            self.measured.error = str(error)
            return None

    def settle(self) -> None:
        """Chooses how long its turns are. A slow call is a turn, and too long for cold caches to matter."""
        answer = self.ask(do="run", calls=2, warm_up=False)  # two: what is traced may be compiled in the second
        if answer is not None:
            seconds = min(answer["seconds"])
            self.warm_up = seconds < SLOW_CALL_SECONDS
            self.calls = max(1, round(TURN_SECONDS / max(1e-6, seconds)))

    def take_turn(self) -> None:
        answer = self.ask(do="run", calls=self.calls, warm_up=self.warm_up)
        if answer is not None:
            self.measured.turns.append(answer["seconds"])
            self.measured.cpu_seconds.append(answer["cpu_seconds"])
            self.measured.page_faults.append(answer["page_faults"])


def measure(case: str, plan: Plan, crew: Crew) -> CaseResult:
    peers = [model_peers.OURS, *plan.peers]
    with report.progress(len(peers) + plan.rounds) as advance:
        contenders = [Contender(crew.get(peer)) for peer in peers]
        for contender in contenders:
            # One after the other: set-up times are compared, too.
            advance(f"{case}: {contender.measured.peer}")
            request = {"peer": contender.measured.peer, "case": case, "dtype": plan.dtype, "tiny": plan.size == "tiny"}
            answer = contender.ask(do="set up", cpus=plan.cpus, **request)
            if answer is not None:
                contender.measured.describe(answer)
        read = take_turns(contenders, plan.rounds, CASES[case].decodes, lambda: advance(case))
    return CaseResult(case, CASES[case].decodes, [contender.measured for contender in contenders], read)


def take_turns(
    contenders: Sequence[Contender], rounds: int, reads: bool, begin_round: Callable[[], None] = lambda: None
) -> float:
    """Returns the best read bandwidth that was seen in between, if wanted: the roof of what decodes."""
    best = 0.0
    for contender in contenders:
        if contender.goes_on:
            contender.settle()
    for _ in range(rounds):
        begin_round()
        for contender in contenders:
            if not contender.goes_on:
                continue
            time.sleep(PAUSE_SECONDS)
            contender.take_turn()
            if reads and contender.measured.peer == model_peers.OURS:
                best = max(best, (contender.ask(do="read") or {"bytes_per_second": 0.0})["bytes_per_second"])
    return best
