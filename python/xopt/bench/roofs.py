"""Measures this machine's roofs: multiply-adds out of registers for each dtype, and reading memory.

They are what `kernels` reports shares of. A multiply-add counts as two operations.
"""

from __future__ import annotations

import argparse

import torch

from xopt.bench.errors import BenchError
from xopt.roofs import KINDS, format_roof, measure_roofs


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
