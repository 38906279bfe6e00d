"""Who had each moment: operators' own time, cut out of what they call, and dealt out between threads.

At every moment of a step, each thread works for one owner. The moment belongs to the main thread's one where the others
idle; where several threads work, each owner gets an equal part of it. So the parts of all owners add up to the steps'
wall time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Piece(Generic[Owner]):
    """A stretch of time in which a thread worked for one owner. Pieces of a thread do not overlap."""

    start: int
    end: int
    thread: int
    owner: Owner


def deal_out(pieces: Iterable[Piece[Owner]], steps: Sequence[tuple[int, int]]) -> tuple[dict[int, float], float]:
    """Nanoseconds by the id of each owner, within the steps; and those of the steps in which nobody worked."""
    boundaries: list[tuple[int, int, int, Owner | None]] = []
    for place, piece in enumerate(pieces):
        if piece.end > piece.start:
            boundaries.append((piece.start, 1, place, piece.owner))
            boundaries.append((piece.end, 0, place, piece.owner))
    for start, end in steps:
        boundaries.append((start, 3, -1, None))
        boundaries.append((end, 2, -1, None))
    boundaries.sort(key=lambda boundary: boundary[:2])
    shares: dict[int, float] = {}
    idle = 0.0
    active: dict[int, int] = {}
    within, before = 0, 0
    for moment, what, place, owner in boundaries:
        if within and moment > before:
            for owner_id in active.values():
                shares[owner_id] = shares.get(owner_id, 0.0) + (moment - before) / len(active)
            if not active:
                idle += moment - before
        before = moment
        if what == 1:
            active[place] = id(owner)
        elif what == 0:
            active.pop(place, None)
        else:
            within += 1 if what == 3 else -1
    return shares, idle


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total += end - start
            reached = end
        elif end > reached:
            total += end - reached
            reached = end
    return total


def clipped(pieces: Iterable[Piece[Owner]], steps: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Piece[Owner]]]:
    """The parts of pieces that lie in steps, each with the step's number."""
    starts = [start for start, _ in steps]
    for piece in pieces:
        for step in range(max(bisect_right(starts, piece.start) - 1, 0), len(steps)):
            begin, end = steps[step]
            if begin >= piece.end:
                break
            start, stop = max(begin, piece.start), min(end, piece.end)
            if stop > start:
                yield step, Piece(start, stop, piece.thread, piece.owner)
