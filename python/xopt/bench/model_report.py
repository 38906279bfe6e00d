"""What the model bench found, as tables, as data and as a chart."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import xopt
from xopt.bench import model_results, report
from xopt.bench.errors import BenchError
from xopt.bench.model_peers import LIBRARIES, OURS
from xopt.bench.model_results import CaseResult, Measured, Plan

FORMAT = 1
COLOURS = {"eager": "#999999", "compile": "#E69F00", "openvino": "#009E73", "ipex": "#CC79A7"}
OTHER_COLOUR = "#56B4E9"
HEADERS = ("set-up s", "relative error", "steady MiB", "peak MiB")


class ModelReport:
    """Grows case by case: a run takes long, and its first results are to be seen at once."""

    def __init__(self, plan: Plan, load_before: float) -> None:
        self.plan = plan
        self.load_before = load_before
        self.results: list[CaseResult] = []
        console = Console()
        self._console = console if console.is_terminal else Console(width=report.TABLE_WIDTH)

    def _say(self, part: Table | str, style: str | None = None) -> None:
        self._console.print(part, style=style, highlight=False, markup=False)

    def begin(self) -> None:
        isa = xopt.capabilities().level
        self._say(f"{self.plan.dtype}, {len(self.plan.cpus)} threads, torch {torch.__version__}, {isa}")
        self._warn()

    def _warn(self) -> None:
        for warning in self.warnings():
            self._say(warning, style="bold yellow")

    def warnings(self) -> list[str]:
        lines = [f"NOT MEASURED: {peer} is not installed" for peer in self.plan.missing]
        if self.plan.size == "tiny":
            lines.append(
                "Tiny models, one after the other in one process each: neither times nor memory mean anything."
            )
        cpus = len(os.sched_getaffinity(0))
        if self.load_before > report.BUSY_LOAD * cpus:
            lines.append(
                f"The machine was busy before the bench began (load {self.load_before:.1f} on {cpus} CPUs): "
                "neither times nor ratios are to be relied on."
            )
        return lines

    def add(self, result: CaseResult) -> None:
        self.results.append(result)
        self._say(_table(result))
        for line in _notes(result):
            self._say(line, style="red" if line.startswith("NO TIME") else None)

    def end(self) -> None:
        self._say(report.summary_table(model_results.summarize(self.results, self.plan)))
        self._warn()

    # ---- Data -------------------------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        libraries = ("transformers", *(LIBRARIES[peer] for peer in self.plan.peers if peer in LIBRARIES))
        findings = model_results.summarize(self.results, self.plan)
        return {
            "format": FORMAT,
            "kind": "models",
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": dataclasses.asdict(xopt.capabilities()),
            "versions": {
                "xopt": xopt.__version__,
                "torch": torch.__version__,
                "python": sys.version.split()[0],
                **{name: _version_of(name) for name in libraries},
            },
            "threads": len(self.plan.cpus),
            "setting": {"load_before": self.load_before, **dataclasses.asdict(self.plan)},
            "rows": [_row(result) for result in self.results],
            "summary": [{**dataclasses.asdict(finding), "met": finding.met} for finding in findings],
            "notes": [*self.warnings(), *(line for result in self.results for line in _notes(result))],
        }

    def write(self, file: pathlib.Path) -> None:
        file.write_text(json.dumps(self.document(), indent=1) + "\n")

    # ---- Chart ------------------------------------------------------------------------------------------------------

    def draw(self, file: pathlib.Path) -> None:
        """Bars: by how much xopt is faster than each peer, in each case."""
        # Not pyplot: it would choose a display for the whole process.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        peers = [peer for peer in self.plan.peers if any(result.speedup(peer) for result in self.results)]
        thickness = 0.8 / max(1, len(peers))
        figure = Figure(figsize=(9, 1.2 + 0.25 * len(self.results) * max(2, len(peers))), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for place, peer in enumerate(peers):
            speedups = [(row, speedup) for row, each in enumerate(self.results) if (speedup := each.speedup(peer))]
            ys = [row + (place - (len(peers) - 1) / 2) * thickness for row, _ in speedups]
            widths = [speedup.minimum for _, speedup in speedups]
            axes.barh(ys, widths, thickness, color=COLOURS.get(peer, OTHER_COLOUR), label=peer)
            for y, width in zip(ys, widths, strict=True):
                axes.text(width, y, f" {width:.2f}", va="center", fontsize=7)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(self.results)), [result.case for result in self.results])
        axes.invert_yaxis()
        isa = xopt.capabilities().level
        axes.set_xlabel(f"times as fast as the peer ({self.plan.dtype}, {len(self.plan.cpus)} threads, {isa})")
        if peers:
            axes.legend(fontsize=8)
        figure.savefig(file, format="png", dpi=130)


def check_chart(file: pathlib.Path | None) -> None:
    """Before anything is measured."""
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise BenchError(f"--png: the folder of {file} does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--png needs matplotlib, which is not installed: pip install 'torch-xopt[bench]'")


def _version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:  # one that was not installed by pip
        return "unknown"


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.0f}"


def _table(result: CaseResult) -> Table:
    table = Table(title=f"{result.case} (ms a {'token' if result.decodes else 'forward'})")
    table.add_column("")
    for header in ("least", "median", "xopt is faster by", "(medians)", *HEADERS):
        table.add_column(header, justify="right")
    for each in result.contenders:
        if not each.was_timed:
            table.add_row(each.peer, *["-"] * 8)
            continue
        speedup = result.speedup(each.peer)
        table.add_row(
            each.peer,
            f"{1e3 * each.minimum:.2f}",
            f"{1e3 * each.median:.2f}",
            *(("-", "-") if speedup is None or each.peer == OURS else (f"{ratio:.2f}x" for ratio in speedup)),
            f"{each.setup_seconds:.1f}",
            f"{each.relative_error:.1e}",
            _mebibytes(each.steady_bytes),
            _mebibytes(each.peak_bytes),
        )
    return table


def _notes(result: CaseResult) -> list[str]:
    lines = []
    if result.ours is not None:
        line = f"{result.case}: {_mebibytes(result.ours.weight_bytes)} MiB of weights"
        share = result.read_share()
        if share is not None:
            rate = result.ours.read_bytes / result.ours.minimum
            line += (
                f"; xopt reads them at {rate / 1e9:.1f} GB/s, "
                f"{share:.0%} of the {result.read_bytes_per_second / 1e9:.1f} GB/s measured between its turns"
            )
        lines.append(line)
    for each in result.contenders:
        if each.error is not None:
            lines.append(f"NO TIME of {each.peer} in {result.case}: {each.error}")
        elif each.note:
            lines.append(f"{each.peer} {each.note}")
    return lines


def _contender_record(measured: Measured) -> dict[str, Any]:
    if not measured.was_timed:
        return {"status": measured.error or "not timed"}
    return {
        "status": "ok",
        "note": measured.note,
        "min_s": measured.minimum,
        "median_s": measured.median,
        "setup_s": measured.setup_seconds,
        "relative_error": measured.relative_error,
        "steady_bytes": measured.steady_bytes,
        "peak_bytes": measured.peak_bytes,
        "turns_s": measured.turns,
    }


def _row(result: CaseResult) -> dict[str, Any]:
    ours = result.ours
    row: dict[str, Any] = {
        "case": result.case,
        "decodes": result.decodes,
        "best_peer": result.best_peer(),
        "contenders": {each.peer: _contender_record(each) for each in result.contenders},
        "speed_over": {
            each.peer: speedup._asdict()
            for each in result.contenders
            if each.peer != OURS and (speedup := result.speedup(each.peer)) is not None
        },
        "error_over_eager": result.error_over_eager(),
    }
    if ours is not None:
        row["weight_bytes"] = ours.weight_bytes
    if ours is not None and result.decodes:
        row["gb_per_s"] = ours.read_bytes / ours.minimum / 1e9
        row["read_roof_gb_per_s"] = result.read_bytes_per_second / 1e9
        row["read_share"] = result.read_share()
    return row
