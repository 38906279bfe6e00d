"""What the model bench was asked for and what it found, and the arithmetic on it: ratios, targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xopt.bench.model_case import BEST, READ_SHARE
from xopt.bench.model_cases import CASES
from xopt.bench.model_peers import OURS
from xopt.bench.results import Finding, geometric_mean

ERROR_OVER_EAGER = 1.1


@dataclass(frozen=True)
class Plan:
    cases: Sequence[str]
    peers: Sequence[str]  # without xopt
    missing: Sequence[str]  # asked for, but not installed
    dtype: str
    cpus: Sequence[int]  # of each contender, in its turn
    rounds: int
    size: str


class Speedup(NamedTuple):
    """How many times as fast as a peer xopt is."""

    minimum: float  # of the fastest times
    median: float  # of the median times


@dataclass
class Measured:
    """One contender in one case; of a failed one, `error` tells why."""

    peer: str
    error: str | None = None
    note: str = ""
    turns: list[list[float]] = field(default_factory=list)
    """Seconds of each call, by rounds."""
    cpu_seconds: list[list[float]] = field(default_factory=list)
    """Of all threads, likewise; with one thread, what other processes take of the core is not in it."""
    page_faults: list[list[int]] = field(default_factory=list)
    setup_seconds: float = math.nan
    """From the model in fp32 to the first result, with the library imported and nothing in compilers' caches."""
    relative_error: float = math.nan
    """norm(result - exact) / norm(exact), of eager fp32."""
    weight_bytes: int = 0
    read_bytes: int = 0
    """Of weights, by the products of one token."""
    steady_bytes: int = 0
    """More than the process had before the model was built, once the source is let go of."""
    peak_bytes: int = 0
    """The same at worst, from the model in fp32 on."""

    def describe(self, answer: dict[str, Any]) -> None:
        for name, value in answer.items():
            setattr(self, name, value)

    @property
    def was_timed(self) -> bool:
        return self.error is None and bool(self.turns)

    @property
    def minimum(self) -> float:
        return min(min(turn) for turn in self.turns)

    @property
    def median(self) -> float:
        return statistics.median(seconds for turn in self.turns for seconds in turn)


@dataclass
class CaseResult:
    case: str
    decodes: bool
    contenders: list[Measured]
    read_bytes_per_second: float = 0.0
    """The best read bandwidth seen between the turns, where the case decodes."""

    def timed(self, peer: str) -> Measured | None:
        return next((each for each in self.contenders if each.peer == peer and each.was_timed), None)

    @property
    def ours(self) -> Measured | None:
        return self.timed(OURS)

    def speedup(self, peer: str) -> Speedup | None:
        ours, theirs = self.ours, self.timed(peer)
        if ours is None or theirs is None:
            return None
        return Speedup(theirs.minimum / ours.minimum, theirs.median / ours.median)

    def best_peer(self) -> str | None:
        timed = [each for each in self.contenders if each.peer != OURS and each.was_timed]
        return min(timed, key=lambda each: each.minimum).peer if timed else None

    def read_share(self) -> float | None:
        """Of the read bandwidth, by weights alone."""
        if self.ours is None or not self.read_bytes_per_second:
            return None
        return self.ours.read_bytes / self.ours.minimum / self.read_bytes_per_second

    def error_over_eager(self) -> float | None:
        """Our error over that of torch in the same dtype; fp32 has none, it is the reference."""
        eager = self.timed("eager")
        if self.ours is None or eager is None or not eager.relative_error:
            return None
        return self.ours.relative_error / eager.relative_error


def _findings_of(result: CaseResult, plan: Plan) -> list[Finding]:
    targets = CASES[result.case].targets if plan.size == "full" else {}

    def finding(what: str, value: float, unit: str, target: float | None, at_most: bool = False) -> Finding:
        return Finding(plan.dtype, what, value, unit, 1, result.case, target, at_most)

    found = []
    best = result.best_peer()
    over_best = result.speedup(best) if best is not None else None
    if over_best is not None:
        what = f"speed over {BEST} ({best})"
        found.append(finding(what, over_best.minimum, "x", targets.get((plan.dtype, BEST))))
    for peer in plan.peers:
        target, speedup = targets.get((plan.dtype, peer)), result.speedup(peer)
        if target is not None and speedup is not None:
            found.append(finding(f"speed over {peer}", speedup.minimum, "x", target))
    share = result.read_share()
    if share is not None:
        target = READ_SHARE if plan.size == "full" and plan.dtype == "bfloat16" else None
        found.append(finding("share of the read bandwidth", share, "%", target))
    error = result.error_over_eager()
    if error is not None:
        found.append(finding("relative error over that of eager", error, "x", ERROR_OVER_EAGER, at_most=True))
    return found


def summarize(results: Sequence[CaseResult], plan: Plan) -> list[Finding]:
    found = [finding for result in results for finding in _findings_of(result, plan)]
    for each in plan.peers:
        speedups = [speedup.minimum for result in results if (speedup := result.speedup(each)) is not None]
        if speedups:
            what = f"speed over {each}, geometric mean"
            found.append(Finding(plan.dtype, what, geometric_mean(speedups), "x", len(speedups)))
    best = [result.speedup(peer) for result in results if (peer := result.best_peer()) is not None]
    speedups = [speedup.minimum for speedup in best if speedup is not None]
    if speedups:
        what = f"speed over {BEST} of each, geometric mean"
        found.append(Finding(plan.dtype, what, geometric_mean(speedups), "x", len(speedups)))
    return found
