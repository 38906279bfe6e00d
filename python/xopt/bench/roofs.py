"""Measures this machine's roofs: multiply-adds out of registers for each dtype, and reading memory.

They are what `kernels` reports shares of. A multiply-add counts as two operations.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from xopt import _C
from xopt.bench.errors import BenchError

REGISTER_REPEATS = 100
READ_REPEATS = 10
KINDS = ("f32", "bf16", "int8", "read")


@dataclass(frozen=True)
class Roof:
    per_second: float  # operations, or bytes
    instruction: str  # what was measured


@dataclass(frozen=True)
class Roofs:
    threads: int
    by_kind: dict[str, Roof]

    def peak(self, dtype: str) -> float:
        """Operations a second."""
        return self.by_kind[dtype].per_second

    @property
    def read(self) -> float:
        """Bytes a second."""
        return self.by_kind["read"].per_second

    def peak_share(self, dtype: str, flop: float, seconds: float) -> float:
        return flop / seconds / self.peak(dtype)

    def read_share(self, moved_bytes: float, seconds: float) -> float:
        return moved_bytes / seconds / self.read

    def attainable(self, dtype: str, flop_per_byte: float) -> float:
        """Operations a second at this intensity: the roofline."""
        return min(self.peak(dtype), flop_per_byte * self.read)


def measure_roofs(threads: int) -> Roofs:
    by_kind = {}
    for kind in KINDS:
        seconds, work, instruction = _C.probe(kind, threads, READ_REPEATS if kind == "read" else REGISTER_REPEATS)
        by_kind[kind] = Roof(work / seconds, instruction)
    return Roofs(threads, by_kind)


def higher_of(first: Roofs, second: Roofs) -> Roofs:
    """A roof is what was reached at best: a busy neighbour only ever lowers a measurement."""
    kinds = {
        kind: max(roof, second.by_kind[kind], key=lambda one: one.per_second) for kind, roof in first.by_kind.items()
    }
    return Roofs(first.threads, kinds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, help="threads (default: 1, then as many as torch uses)")


def run(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    if options.threads is not None and options.threads < 1:
        raise BenchError(f"--threads: got {options.threads}, expected at least 1")
    counts = [options.threads] if options.threads else sorted({1, torch.get_num_threads()})
    table = Table(title="Roofs of this machine, measured")
    table.add_column("what")
    table.add_column("instruction")
    for count in counts:
        table.add_column(f"{count} thread{'s' if count > 1 else ''}", justify="right")
    measured = [measure_roofs(count) for count in counts]
    for kind in KINDS:
        cells = [format_roof(kind, roofs.by_kind[kind]) for roofs in measured]
        table.add_row(kind, measured[0].by_kind[kind].instruction, *cells)
    Console().print(table)


def format_roof(kind: str, roof: Roof) -> str:
    if kind == "read":
        return f"{roof.per_second / 1e9:.1f} GB/s"
    return f"{roof.per_second / 1e12:.3f} T{'OP' if kind == 'int8' else 'FLOP'}/s"
