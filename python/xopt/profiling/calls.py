"""From operators to kernels: which calls did the work, and which pieces of time are theirs.

An operator that does work owns what it calls, but for copies and allocations, which are calls of their own. One that
only calls others, or makes a view, is framework overhead, as is the time between operators and what it takes to launch
kernels of other devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from xopt.profiling.category import (
    NESTED_APART,
    OVERHEAD,
    POINTWISE,
    category_of,
    is_compiled_graph,
    is_compiled_kernel,
)
from xopt.profiling.events import Op
from xopt.profiling.timeline import Piece

# A graph that was compiled before the profiler was on does not tell of its kernels.
COMPILED_LOOPS = "loops of a compiled graph"


@dataclass(eq=False)
class Call:
    """A kernel's call; of framework overhead, all of one operator in one module together."""

    name: str
    category: str
    module: str | None
    op: Op | None = None
    """None: framework overhead."""
    names: list[str] = field(default_factory=list)
    """String arguments, in the order of the schema, where the native side has told them."""
    regions: list[Region] = field(default_factory=list)
    instance: str = ""
    """That ran, where it was not the heuristics' own choice: "avx512, 4 panels"."""
    absorbs: bool = True
    """Whether what its operator calls is part of it."""


@dataclass(frozen=True)
class Region:
    """A parallel region of xopt's kernels."""

    start: int
    end: int
    busy: int
    """Nanoseconds that all threads together spent in its body."""
    threads: int


def calls_and_pieces(roots: Iterable[Op]) -> tuple[list[Call], list[Piece[Call]]]:
    cutter = _Cutter()
    for root in roots:
        cutter.visit(root, None)
    return cutter.calls, cutter.pieces


class _Cutter:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.pieces: list[Piece[Call]] = []
        self._overhead: dict[tuple[str, str | None], Call] = {}

    def visit(self, op: Op, around: Call | None) -> None:
        call = self._call_of(op, around)
        reached = op.start
        for child in op.children:
            if child.start > reached:
                self.pieces.append(Piece(reached, child.start, op.thread, call))
            self.visit(child, call)
            reached = max(reached, child.end)
        if op.end > reached:
            self.pieces.append(Piece(reached, op.end, op.thread, call))

    def _call_of(self, op: Op, around: Call | None) -> Call:
        category = OVERHEAD if op.launches else category_of(op.name, op.overload)
        within = around if around is not None and around.category != OVERHEAD and around.absorbs else None
        if within is not None and (category not in NESTED_APART or within.category == category):
            return within
        of_cpu = is_compiled_graph(op.name) and not op.launches
        if of_cpu and not any(is_compiled_kernel(inner.name) for inner in op.walk()):
            return self._add(Call(COMPILED_LOOPS, POINTWISE, op.module, op, absorbs=False))
        if category == OVERHEAD:
            key = op.name, op.module
            if key not in self._overhead:
                self._overhead[key] = self._add(Call(op.name, category, op.module))
            return self._overhead[key]
        return self._add(Call(op.name, category, op.module, op))

    def _add(self, call: Call) -> Call:
        self.calls.append(call)
        return call


def add_trace(calls: Iterable[Call], entries: Iterable[tuple[int, int, int, int, int, str]]) -> None:
    """Gives each call of xopt's what the native side has noted during it (`xopt._C.trace_entries`)."""
    by_thread: dict[int, list[Call]] = {}
    for call in calls:
        if call.op is not None and call.op.name.startswith("xopt::"):
            by_thread.setdefault(call.op.thread, []).append(call)
    for of_thread in by_thread.values():
        of_thread.sort(key=lambda call: call.op.start if call.op else 0)
    places = dict.fromkeys(by_thread, 0)
    for start, end, busy, caller, threads, name in sorted(entries):
        of_thread = by_thread.get(caller, [])
        middle = (start + end) // 2
        place = places.get(caller, 0)
        while place < len(of_thread) and _end(of_thread[place]) < middle:
            place += 1
        if caller in places:
            places[caller] = place
        if place == len(of_thread) or of_thread[place].op is None or _start(of_thread[place]) > middle:
            continue
        if threads < 0:
            of_thread[place].instance = name
        elif threads:
            of_thread[place].regions.append(Region(start, end, busy, threads))
        else:
            of_thread[place].names.append(name)


def _start(call: Call) -> int:
    return call.op.start if call.op else 0


def _end(call: Call) -> int:
    return call.op.end if call.op else 0
