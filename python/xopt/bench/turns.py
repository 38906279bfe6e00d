"""Timing in turns: A B C A B C ... within one process, so that what slows the machine slows all contenders alike."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

SAMPLE_SECONDS = 2e-3  # a sample is a batch of calls that takes at least this long
SLOW_CALL_SECONDS = 0.25  # a first call this slow counts as the warm-up
CASE_SECONDS = 10.0  # no round is begun after this, whatever was asked for


@dataclass
class Runner:
    """A contender that is ready to run, with its packed weights taking turns."""

    name: str
    call: Callable[[Any], object]
    weights: Iterator[Any]
    calls: int = 1
    samples: list[float] = field(default_factory=list)

    def run(self, calls: int) -> float:
        """Seconds that `calls` calls take."""
        call = self.call
        batch = list(itertools.islice(self.weights, calls))
        start = time.perf_counter()
        for weight in batch:
            call(weight)
        return time.perf_counter() - start

    def settle(self, first_seconds: float | None = None) -> None:
        """Warms up and chooses how many calls make a sample."""
        seconds = first_seconds
        if seconds is None or seconds < SLOW_CALL_SECONDS:
            self.run(1)
            seconds = min(self.run(1) for _ in range(3))
            calls = self._calls_of(seconds)
            if calls > 1:
                seconds = min(self.run(calls) / calls for _ in range(2))
        self.calls = self._calls_of(seconds)

    @staticmethod
    def _calls_of(seconds: float) -> int:
        return max(1, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-7)))

    def sample(self) -> None:
        self.samples.append(self.run(self.calls) / self.calls)


def make_runner(name: str, call: Callable[[Any], object], weights: Sequence[Any]) -> Runner:
    return Runner(name=name, call=call, weights=itertools.cycle(weights))


def take_turns(runners: Sequence[Runner], least_rounds: int, seconds: float) -> None:
    """Rounds of one sample each: at least `least_rounds`, and on until `seconds` a contender are spent."""
    start = time.perf_counter()
    for done in itertools.count():
        spent = time.perf_counter() - start
        enough = done >= least_rounds and spent >= seconds * len(runners)
        if not runners or enough or (done > 0 and spent >= CASE_SECONDS):
            return
        for runner in runners:
            runner.sample()


@dataclass(frozen=True)
class Timing:
    """Seconds of a call."""

    minimum: float
    median: float
    samples: tuple[float, ...]  # one a round
    calls: int  # in each sample


def timing_of(runner: Runner) -> Timing:
    samples = tuple(runner.samples)
    return Timing(min(samples), statistics.median(samples), samples, runner.calls)
