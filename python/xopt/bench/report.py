"""What the bench shows: progress while it runs, then tables, a summary and JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import xopt
from xopt.bench import conv_peers, peers, plot, results
from xopt.bench.conv_shapes import MODEL_CONVS, QUICK_STEP, ConvShape
from xopt.bench.errors import BenchError
from xopt.bench.results import Case, Finding
from xopt.roofs import KINDS, Roofs, format_roof

FORMAT = 1
TABLE_WIDTH = 160  # where the output is no terminal
BUSY_LOAD = 0.5  # of the CPUs


@dataclass(frozen=True)
class Setting:
    """What a run was made under, beside what is in the cases."""

    load_before: float  # the load average of the minute before
    least_rounds: int
    seconds: float  # a contender and shape
    quick: bool = False


def check_destinations(json_file: Path | None, plot_file: Path | None) -> None:
    """Before anything is measured: a run of minutes must not end in a missing folder or library."""
    for option, file in (("--json", json_file), ("--plot", plot_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise BenchError(f"{option}: the folder of {file} does not exist")
    if plot_file is not None:
        plot.check_library()


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; what it yields begins the next of `total` steps."""
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def advance(description: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=description)
            begun += 1

        yield advance


# ---- Tables ---------------------------------------------------------------------------------------------------------


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _peer_cell(case: Case, peer: str, ours: str = peers.OURS) -> str:
    if peer not in case.timings:
        return "-"
    ratio = results.ratio(case, ours, peer)
    text = _milliseconds(case.seconds(peer))
    return text if ratio is None else f"{text} ({ratio.minimum:.2f}x)"


def _our_cells(case: Case, roofs: Roofs) -> list[str]:
    if peers.OURS not in case.timings:
        return ["-"] * 6
    timing, flop = case.timings[peers.OURS], case.shape.flop
    seconds = timing.minimum
    return [
        _milliseconds(seconds),
        _milliseconds(timing.median),
        f"{flop / seconds / 1e12:#.3g}",
        f"{roofs.peak_share(case.dtype, flop, seconds):.0%}",
        f"{case.bytes / seconds / 1e9:.1f}",
        f"{roofs.read_share(case.bytes, seconds):.0%}",
    ]


def _epilogue_cell(case: Case, fused: str) -> str:
    cost = results.epilogue_cost(case, fused)
    return "-" if cost is None else f"{cost:+.0%}"


def case_table(cases: Sequence[Case], roofs: Roofs) -> Table:
    table = Table(title=f"GEMM, {roofs.threads} threads; ms are minima; in brackets, how many times as fast xopt is")
    table.add_column("dtype")
    for header in ("M x N x K", "xopt ms", "median", "TFLOP/s", "of peak", "GB/s", "of read"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in (*peers.PEERS, "+bias\n+gelu", "+bias\n+residual"):
        table.add_column(header, justify="right", no_wrap=True)
    for before, case in zip([None, *cases], cases):  # noqa: B905
        if before is not None and before.dtype != case.dtype:
            table.add_section()
        table.add_row(
            case.dtype,
            str(case.shape),
            *_our_cells(case, roofs),
            *(_peer_cell(case, peer) for peer in peers.PEERS),
            *(_epilogue_cell(case, fused) for fused in peers.FUSED),
        )
    return table


def conv_table(cases: Sequence[Case], roofs: Roofs) -> Table:
    title = f"Convolutions, {roofs.threads} threads; ms are minima; in brackets, how many times as fast xopt is"
    table = Table(title=title)
    table.add_column("dtype")
    for header in ("C x H x W : N x K x K", "xopt ms", "median", "TFLOP/s", "of peak"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in (*conv_peers.PEERS, "fused\nend ms", "conv, add,\nrelu apart", "oneDNN's\nfused end"):
        table.add_column(header, justify="right", no_wrap=True)
    for case in cases:
        has_end = conv_peers.OURS_END in case.timings
        table.add_row(
            case.dtype,
            str(case.shape),
            *_our_cells(case, roofs)[:4],
            *(_peer_cell(case, peer) for peer in conv_peers.PEERS),
            _milliseconds(case.seconds(conv_peers.OURS_END)) if has_end else "",
            *(_peer_cell(case, end, conv_peers.OURS_END) if has_end else "" for end in conv_peers.ENDS[1:]),
        )
    return table


def roof_table(roofs: Roofs) -> Table:
    table = Table(title=f"Roofs, measured, {roofs.threads} threads")
    for header in ("what", "at best", "instruction"):
        table.add_column(header)
    for kind in KINDS:
        roof = roofs.by_kind[kind]
        table.add_row(kind, format_roof(kind, roof), roof.instruction)
    return table


def _format_value(finding: Finding, value: float) -> str:
    return f"{value:.1%}" if finding.unit == "%" else f"{value:.2f}x"


def summary_table(findings: Sequence[Finding]) -> Table:
    table = Table(title="Summary")
    for header in ("dtype", "what", "value", "shapes", "where", "target"):
        table.add_column(header, justify="right" if header in ("value", "shapes") else "left")
    for finding in findings:
        target = ""
        if finding.target is not None:
            bound = "at most" if finding.at_most else "at least"
            target = f"{bound} {_format_value(finding, finding.target)}: {'met' if finding.met else 'missed'}"
        table.add_row(
            finding.dtype,
            finding.what,
            _format_value(finding, finding.value),
            str(finding.shapes),
            finding.shape,
            target,
        )
    return table


def notes(cases: Sequence[Case], setting: Setting) -> list[str]:
    """What a reader of the table must know: where weights came from, and who has no time and why."""
    lines = []
    cpus = len(os.sched_getaffinity(0))
    if setting.load_before > BUSY_LOAD * cpus:
        lines.append(
            f"The machine was busy before the bench began (load {setting.load_before:.1f} on {cpus} CPUs): "
            "neither times nor roofs are to be relied on."
        )
    copies = [case.rotation.copies for case in cases]
    smallest = min(case.rotation.set_bytes for case in cases) >> 20
    sources = sorted({case.rotation.source for case in cases})
    lines.append(
        f"Weights rotate over {min(copies)} to {max(copies)} copies, {smallest} MiB or more a contender, "
        f"and so come from {' or '.join(sources)}. Freed outputs stay mapped, for all contenders."
    )
    if any(case.dtype == "int8" for case in cases):
        lines.append("int8: u8 activations with a zero point, s8 weights with a scale per column, bf16 output.")
    convs = {case.shape for case in cases if isinstance(case.shape, ConvShape)}
    if convs:
        lines.append(
            f"{len(convs)} convolutions; images with their channels last, as they are in a model, and always the same."
        )
    if convs and setting.quick:
        total = sum(len(texts) for texts in MODEL_CONVS.values())
        lines.append(
            f"--quick, without a list: every one in {QUICK_STEP} of the {total} convolutions, in the models' order, and"
            f" {setting.seconds} s a contender. For what the geometric mean is, measure all."
        )
    for (dtype, contender, reason), at in results.failures(cases).items():
        where = (
            "" if len(at) == sum(case.dtype == dtype for case in cases) else f" (at {len(at)} shapes, first {at[0]})"
        )
        lines.append(f"{dtype}: {contender} {reason}{where}")
    return lines


# ---- JSON -----------------------------------------------------------------------------------------------------------


def _contender_record(case: Case, name: str, roofs: Roofs) -> dict[str, Any]:
    if name in case.failures:
        return {"status": case.failures[name]}
    timing = case.timings[name]
    dtype = "bf16" if name == peers.OURS_BF16 else case.dtype
    record: dict[str, Any] = {
        "status": "ok",
        "min_s": timing.minimum,
        "median_s": timing.median,
        "rounds": len(timing.samples),
        "calls_per_sample": timing.calls,
        "tflops": case.shape.flop / timing.minimum / 1e12,
        "peak_share": roofs.peak_share(dtype, case.shape.flop, timing.minimum),
    }
    if name != peers.OURS_BF16:  # it moves other bytes than the case's
        record["gb_per_s"] = case.bytes / timing.minimum / 1e9
        record["read_share"] = roofs.read_share(case.bytes, timing.minimum)
    return record


def case_record(case: Case, roofs: Roofs) -> dict[str, Any]:
    others = [name for name in case.timings if name != peers.OURS and name not in peers.FUSED]
    return {
        **_shared_record(case, roofs),
        "speed_over": _speeds(case, peers.OURS, others),
        "epilogue_cost": {name: results.epilogue_cost(case, name) for name in peers.FUSED if name in case.timings},
    }


def conv_record(case: Case, roofs: Roofs) -> dict[str, Any]:
    return {
        "convolution": str(case.shape),
        **_shared_record(case, roofs),
        "speed_over": _speeds(case, peers.OURS, [name for name in case.timings if name in conv_peers.PEERS]),
        "fused_end_over": _speeds(
            case, conv_peers.OURS_END, [name for name in case.timings if name in conv_peers.ENDS[1:]]
        ),
    }


def _speeds(case: Case, ours: str, others: Sequence[str]) -> dict[str, Any]:
    ratios = {name: results.ratio(case, ours, name) for name in others}
    return {name: dataclasses.asdict(value) for name, value in ratios.items() if value is not None}


def _shared_record(case: Case, roofs: Roofs) -> dict[str, Any]:
    return {
        "dtype": case.dtype,
        "m": case.shape.m,
        "n": case.shape.n,
        "k": case.shape.k,
        "flop": case.shape.flop,
        "bytes": case.bytes,
        "weight_copies": case.rotation.copies,
        "weight_set_bytes": case.rotation.set_bytes,
        "weights_from": case.rotation.source,
        "contenders": {name: _contender_record(case, name, roofs) for name in [*case.timings, *case.failures]},
    }


def document(cases: Sequence[Case], roofs: Roofs, findings: Sequence[Finding], setting: Setting) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": "kernels",
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": dataclasses.asdict(xopt.capabilities()),
        "versions": {
            "xopt": xopt.__version__,
            "torch": torch.__version__,
            "torch_build": torch.__config__.show(),
            "python": sys.version.split()[0],
        },
        "threads": roofs.threads,
        "setting": dataclasses.asdict(setting),
        "roofs": {kind: dataclasses.asdict(roof) for kind, roof in roofs.by_kind.items()},
        "kernels": [dataclasses.asdict(kernel) for kernel in xopt.kernels() if kernel.chosen],
        "rows": [case_record(case, roofs) for case in cases if not isinstance(case.shape, ConvShape)],
        "convolutions": [conv_record(case, roofs) for case in cases if isinstance(case.shape, ConvShape)],
        "summary": [{**dataclasses.asdict(finding), "met": finding.met} for finding in findings],
        "notes": notes(cases, setting),
    }


def publish(
    cases: Sequence[Case], roofs: Roofs, setting: Setting, json_file: Path | None, plot_file: Path | None
) -> None:
    findings = results.summarize(cases, roofs)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    products = [case for case in cases if not isinstance(case.shape, ConvShape)]
    convs = [case for case in cases if isinstance(case.shape, ConvShape)]
    tables = [table(some, roofs) for table, some in ((case_table, products), (conv_table, convs)) if some]
    for part in (roof_table(roofs), *tables, summary_table(findings), *notes(cases, setting)):
        console.print(part, highlight=False, markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(document(cases, roofs, findings, setting), indent=1) + "\n")
        console.print(f"wrote {json_file}", highlight=False, markup=False)
    if plot_file is not None:
        plot.draw(cases, roofs, plot_file)
        console.print(f"wrote {plot_file}", highlight=False, markup=False)
