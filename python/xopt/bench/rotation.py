"""How many copies of a weight take turns, so that each comes from where it would in a model: not from L2."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import xopt

MIB = 1 << 20
LARGEST_SET = 512 * MIB
MOST_COPIES = 1024  # of a weight that is small beside its images: what it is read from does not matter then


@dataclass(frozen=True)
class Caches:
    l2_bytes: int  # of one core
    last_level_bytes: int


def known_caches() -> Caches:
    """This machine's caches; the usual ones of a server where the CPU does not tell."""
    caches = xopt.capabilities().caches
    l2_bytes = caches.l2_bytes or 2 * MIB
    return Caches(l2_bytes=l2_bytes, last_level_bytes=max(caches.l3_bytes or 32 * MIB, l2_bytes))


@dataclass(frozen=True)
class Rotation:
    copies: int
    set_bytes: int
    source: str  # "memory": the set is larger than the last-level cache; else "last-level cache"


def plan_rotation(weight_bytes: int, caches: Caches, threads: int) -> Rotation:
    """At least two copies and twice all L2 together, and twice the last-level cache; not past either bound."""
    wanted = max(2 * threads * caches.l2_bytes, min(2 * caches.last_level_bytes, LARGEST_SET))
    copies = min(MOST_COPIES, max(2, math.ceil(wanted / weight_bytes)))
    set_bytes = copies * weight_bytes
    source = "memory" if set_bytes > caches.last_level_bytes else "last-level cache"
    return Rotation(copies=copies, set_bytes=set_bytes, source=source)


def outputs_kept_mapped() -> AbstractContextManager[object]:
    """Has malloc keep what is freed, as a caching allocator would.

    Otherwise every large output would be mapped anew, and all contenders would be timed mostly on page faults.
    """
    try:
        return xopt.runtime.memory_pool()
    except RuntimeError:  # another allocator stands in malloc's place, and keeps what is freed by itself
        return nullcontext()
