"""Putting a process onto its cores and memory nodes, from inside it, by system calls: neither numactl nor taskset.

All of it lasts over exec. A call that is denied (containers deny set_mempolicy) is told and does no harm.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection, Sequence

_libc = ctypes.CDLL(None, use_errno=True)

_SET_MEMPOLICY = 238  # x86-64; the C library has no function for it
_MODES = {"prefer": 1, "bind": 2}
_PR_SET_PDEATHSIG = 1
_WORD_BITS = 64


def bind(cpus: Collection[int], mode: str, nodes: Sequence[int]) -> list[str]:
    """Binds the calling thread, and what it starts. Returns what was denied, in words."""
    denied = []
    try:
        if os.sched_getaffinity(0) != set(cpus):  # what is so already cannot be denied
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        denied.append(f"sched_setaffinity: {error.strerror}: the system chooses the cores")
    if mode in _MODES:
        number = set_memory_policy(mode, nodes)
        if number:
            denied.append(
                f"set_mempolicy: {os.strerror(number)}: memory comes from the node that asks first "
                "(Docker permits the call with --cap-add SYS_NICE)"
            )
    return denied


def set_memory_policy(mode: str, nodes: Sequence[int]) -> int:
    """0, or the number of the error."""
    words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel takes one bit less than it is told of.
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)
    failed = _libc.syscall(ctypes.c_long(_SET_MEMPOLICY), ctypes.c_int(_MODES[mode]), mask, bits)
    return ctypes.get_errno() if failed else 0


def die_with(parent: int) -> None:
    """Has this process killed when `parent`, which started it, ends in any way."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it has ended in between
        os._exit(128 + signal.SIGKILL)
