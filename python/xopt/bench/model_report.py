"""What the model bench found, as a table, as data and as a chart."""

from __future__ import annotations

import importlib.util
import math
import pathlib
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from xopt import _C
from xopt.bench.errors import BenchError
from xopt.bench.model_peers import OURS
from xopt.bench.roofs import measure_roofs

COLOURS = {"eager": "#999999", "compile": "#E69F00", "openvino": "#009E73", "ipex": "#CC79A7"}


@dataclass
class Measured:
    """One contender in one case; of a failed one, `error` tells why."""

    peer: str
    error: str | None = None
    turns: list[list[float]] = field(default_factory=list)
    """Seconds of each call, by rounds."""
    setup_seconds: float = math.nan
    relative_error: float = math.nan
    weight_bytes: int = 0
    steady_bytes_more: int = 0
    peak_bytes: int = 0

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

    @property
    def ours(self) -> Measured | None:
        return next((each for each in self.contenders if each.peer == OURS and each.was_timed), None)

    def speedup(self, peer: str) -> tuple[float, float] | None:
        """How many times as fast as a peer we are: by minima, and by medians."""
        theirs = next((each for each in self.contenders if each.peer == peer and each.was_timed), None)
        if theirs is None or self.ours is None:
            return None
        return theirs.minimum / self.ours.minimum, theirs.median / self.ours.median

    def best_peer(self) -> str | None:
        timed = [each for each in self.contenders if each.peer != OURS and each.was_timed]
        return min(timed, key=lambda each: each.minimum).peer if timed else None


@dataclass
class ModelReport:
    dtype: str
    threads: int
    size: str
    missing_peers: list[str]
    results: list[CaseResult] = field(default_factory=list)
    read_bytes_per_second: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def begin(self) -> None:
        self.versions = {"torch": torch.__version__, "isa": str(_C.active_isa())}
        self.read_bytes_per_second = measure_roofs(self.threads).read
        console = Console()
        console.print(f"{self.dtype}, {self.threads} threads, torch {torch.__version__}, {self.versions['isa']}")
        for peer in self.missing_peers:
            console.print(f"[bold yellow]NOT MEASURED: {peer} is not installed[/]")

    def add(self, result: CaseResult) -> None:
        self.results.append(result)
        Console().print(self._table(result))

    def _table(self, result: CaseResult) -> Table:
        what = "a token" if result.decodes else "a forward"
        table = Table(
            *("", f"least ms {what}", "median ms", "xopt is faster by", "(medians)", "set-up s", "rel. error"),
            *("steady MiB", "peak MiB"),
            title=result.case,
        )
        for each in result.contenders:
            if not each.was_timed:
                table.add_row(each.peer, f"[red]{each.error or 'not timed'}[/]")
                continue
            speedup = result.speedup(each.peer) or (math.nan, math.nan)
            table.add_row(
                each.peer,
                f"{1e3 * each.minimum:.2f}",
                f"{1e3 * each.median:.2f}",
                f"{speedup[0]:.2f}x",
                f"{speedup[1]:.2f}x",
                f"{each.setup_seconds:.1f}",
                f"{each.relative_error:.1e}",
                f"{each.steady_bytes_more / 2**20:+.0f}",
                f"{each.peak_bytes / 2**20:.0f}",
            )
        if result.decodes and result.ours is not None:
            rate = result.ours.weight_bytes / result.ours.minimum
            share = rate / self.read_bytes_per_second
            table.caption = f"weights are read at {rate / 1e9:.1f} GB/s, {share:.0%} of the measured read bandwidth"
        return table

    def end(self) -> None:
        table = Table("case", "best peer", "xopt is faster by", "(medians)", title="against the best peer of each case")
        logarithms = []
        for result in self.results:
            best = result.best_peer()
            speedup = result.speedup(best) if best is not None else None
            if best is None or speedup is None:
                table.add_row(result.case, "-", "-", "-")
                continue
            logarithms.append(math.log(speedup[0]))
            table.add_row(result.case, best, f"{speedup[0]:.2f}x", f"{speedup[1]:.2f}x")
        if logarithms:
            table.add_row("geometric mean", "", f"{math.exp(statistics.fmean(logarithms)):.2f}x", "")
        Console().print(table)

    def draw(self, file: pathlib.Path) -> None:
        """Bars: by how much xopt is faster than each peer, in each case."""
        check_plotting()
        # Not pyplot: it would choose a display for the whole process.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        peers = list(dict.fromkeys(each.peer for result in self.results for each in result.contenders))
        peers = [peer for peer in peers if peer != OURS and any(result.speedup(peer) for result in self.results)]
        figure = Figure(figsize=(9, 1.2 + 0.5 * len(self.results)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        thickness = 0.8 / max(1, len(peers))
        for place, peer in enumerate(peers):
            for row, result in enumerate(self.results):
                speedup = result.speedup(peer)
                if speedup is None:
                    continue
                y = row + (place - (len(peers) - 1) / 2) * thickness
                label = peer if row == 0 else None
                axes.barh(y, speedup[0], thickness, color=COLOURS.get(peer, "#56B4E9"), label=label)
                axes.text(speedup[0], y, f" {speedup[0]:.2f}", va="center", fontsize=7)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(self.results)), [result.case for result in self.results])
        axes.invert_yaxis()
        axes.set_xlabel(f"times as fast as the peer ({self.dtype}, {self.threads} threads, {self.versions['isa']})")
        handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if handles:
            axes.legend(handles.values(), handles.keys(), fontsize=8)
        figure.savefig(file, format="png", dpi=130)


def check_plotting() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--png needs matplotlib, which is not installed: pip install 'torch-xopt[bench]'")
