"""What was found for a call: which instance runs, and how much faster it is than what the heuristics would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xopt import _C

Row = tuple[str, str, str, int, list[int], list[int], str, float, float]
DEFAULT = (-1, 0, 0, 0, 0, 0)
"""The numbers of the heuristics' own choice, as `_C.tuned_calls` tells choices."""


@dataclass(frozen=True)
class Tuned:
    kernel: str
    dtype: str
    level: str
    """The highest that kernels were chosen from."""
    threads: int
    sizes: tuple[int, ...]
    """Of the call, in the native side's order (csrc/ops/tuned.h)."""
    choice: tuple[int, ...]
    instance: str
    """That runs, in words: the level, and what it does otherwise than the heuristics."""
    seconds: float
    """Of a call, the fastest; as `default_seconds`."""
    default_seconds: float
    """Of what the heuristics choose."""

    @classmethod
    def of_row(cls, row: Row) -> Tuned:
        kernel, dtype, level, threads, sizes, choice, instance, seconds, default_seconds = row
        return cls(kernel, dtype, level, threads, tuple(sizes), tuple(choice), instance, seconds, default_seconds)

    @property
    def is_default(self) -> bool:
        """Whether nothing was clearly faster than the heuristics' choice."""
        return self.choice == DEFAULT

    @property
    def gain(self) -> float:
        """How many times as fast as the heuristics' choice."""
        return self.default_seconds / self.seconds if self.seconds else 1.0

    @property
    def size(self) -> str:
        """As the profiler writes it."""
        sizes = self.sizes
        if self.kernel == "attention":
            return _joined(sizes[:5])
        if self.kernel.startswith("gemm"):
            return _joined(sizes[:3])
        images, channels, products, columns, _, _, *along = sizes
        inside, _, kernel, stride = (along[place::6] for place in range(4))
        image = _joined([images, channels * products, *inside])
        return f"{image}, {_joined(kernel)}/{_joined(stride)} to {columns * products}"


def _joined(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def known() -> tuple[Tuned, ...]:
    """What this process knows, found by itself or read from disk."""
    return tuple(Tuned.of_row(row) for row in _C.tuned_calls())
