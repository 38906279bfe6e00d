"""What instances did and how fast: `report`, by which a script tells, and the summary of `--benchmark`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from xopt.launch.plan import Instance

_MARK = "xopt-report "
_MARK_BYTES = _MARK.encode()


def report(throughput: float | None = None, latency_ms: float | None = None) -> None:
    """Prints a line by which `xopt-launch --benchmark` learns how fast this instance was; the last one counts.

    throughput: in any unit, the same in all instances (they are added up); latency_ms: of one request.
    """
    told = {"throughput": throughput, "latency_ms": latency_ms}
    for name, value in told.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"report: {name}: expected a number, got {type(value).__name__}")
    print(_MARK + json.dumps({name: value for name, value in told.items() if value is not None}), flush=True)


@dataclass
class Measured:
    """One instance."""

    index: int
    status: int | None = None
    stopped: bool = False
    """It ended after the run was being stopped."""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    throughput: float | None = None
    latency_ms: float | None = None

    def watch(self, line: bytes) -> None:
        """Takes a line that the instance has printed."""
        if not line.startswith(_MARK_BYTES):
            return
        try:
            told = json.loads(line[len(_MARK) :])
        except ValueError:
            return
        for name in ("throughput", "latency_ms"):
            if isinstance(told, dict) and isinstance(told.get(name), (int, float)):
                setattr(self, name, told[name])

    @property
    def cpus_used(self) -> float:
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0


def read_logs(measured: Iterable[Measured], instances: Iterable[Instance]) -> None:
    """What instances have told whose output went to files."""
    logs = {instance.index: instance.log for instance in instances}
    for one in measured:
        log = logs[one.index]
        if log is not None:
            with log.open("rb") as lines:
                for line in lines:
                    one.watch(line)


def as_data(measured: Iterable[Measured]) -> dict[str, Any]:
    """For JSON: the instances, and what they come to together."""
    instances = list(measured)
    throughputs = [one.throughput for one in instances if one.throughput is not None]
    latencies = [one.latency_ms for one in instances if one.latency_ms is not None]
    return {
        "instances": [{**vars(one), "cpus_used": one.cpus_used} for one in instances],
        "total": {
            "throughput": sum(throughputs) if throughputs else None,
            "instances_that_reported": len(throughputs),
            "latency_ms_mean": sum(latencies) / len(latencies) if latencies else None,
            "latency_ms_max": max(latencies, default=None),
            "wall_seconds": max((one.wall_seconds for one in instances), default=0.0),
            "cpus_used": sum(one.cpus_used for one in instances),
            "peak_bytes": sum(one.peak_bytes for one in instances),
        },
    }


def as_table(measured: Iterable[Measured]) -> Table:
    from rich.table import Table

    data = as_data(measured)
    table = Table(title="Instances", title_justify="left", show_footer=len(data["instances"]) > 1)
    total = data["total"]
    columns = {
        "instance": "all",
        "status": "",
        "wall s": f"{total['wall_seconds']:.2f}",
        "CPUs used": f"{total['cpus_used']:.2f}",
        "peak MB": f"{total['peak_bytes'] / 1e6:.0f}",
        "throughput": _number(total["throughput"]),
        "latency ms": _number(total["latency_ms_mean"]),
    }
    for name, footer in columns.items():
        table.add_column(name, footer=footer, justify="right")
    for one in data["instances"]:
        table.add_row(
            str(one["index"]),
            f"{one['status']}{' (stopped)' if one['stopped'] else ''}",
            f"{one['wall_seconds']:.2f}",
            f"{one['cpus_used']:.2f}",
            f"{one['peak_bytes'] / 1e6:.0f}",
            _number(one["throughput"]),
            _number(one["latency_ms"]),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def print_table(measured: Iterable[Measured]) -> None:
    from rich.console import Console

    Console(file=sys.stdout).print(as_table(measured))
