"""A process that outlives the launcher, to kill what is left of the instances where the launcher was itself killed.

The parent-death signal reaches an instance, but not what the instance has started. The guard knows all process groups
that run, over a pipe; when the pipe ends before they do, it kills them.
"""

from __future__ import annotations

import contextlib
import os
import signal


class Guard:
    """The launcher's end. A context: it ends with the launcher, however that ends."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writing)
                _watch(reading)
            finally:
                os._exit(0)
        os.close(reading)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def _tell(self, message: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody has killed the guard: the parent-death signal remains
            os.write(self._writing, message.encode())


def _watch(reading: int) -> None:
    os.setsid()  # signals of the terminal are for the launcher
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # a reader of the launcher's output must not wait for this process
        os.dup2(nothing, standard)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with os.fdopen(reading) as messages:
        for message in messages:
            group = int(message[1:])
            (groups.add if message[0] == "+" else groups.discard)(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
