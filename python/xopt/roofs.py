"""This machine's roofs, measured: multiply-adds out of registers for each dtype, and reading memory.

They are what the bench and the profiler report shares of. A multiply-add counts as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from xopt import _C

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


def format_roof(kind: str, roof: Roof) -> str:
    if kind == "read":
        return f"{roof.per_second / 1e9:.1f} GB/s"
    return f"{roof.per_second / 1e12:.3f} T{'OP' if kind == 'int8' else 'FLOP'}/s"
