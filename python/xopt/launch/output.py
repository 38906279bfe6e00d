"""What instances print: carried to the launcher's own output line by line, each line with its instance's number.

Two instances never share a line. Of a line that a progress bar has written over, the last state is shown.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

_CHUNK = 1 << 16
# A line that never ends is not collected for ever.
_LONGEST_LINE = 1 << 20


class ClosedOutput(Exception):
    """Nobody reads what the launcher writes to this descriptor any more."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.descriptor = descriptor


def write_all(descriptor: int, data: bytes) -> None:
    """Writes past Python's buffers, whose last flush would raise anew once a reader has gone."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # somebody who shares the terminal has made it so
            select.select([], [descriptor], [])
        except BrokenPipeError as error:
            raise ClosedOutput(descriptor) from error


def open_missing_standard_streams() -> None:
    """A descriptor that was closed at the start would be given to the next file that is opened, and be written to."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free: this one


class Stream:
    """One pipe of an instance: reads what there is, and hands on whole lines."""

    def __init__(self, descriptor: int, target: int, tag: str, watch: Callable[[bytes], None]) -> None:
        """`target`: the descriptor to write to; `watch` is shown each line without the tag."""
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._target = target
        self._tag = tag.encode()
        self._watch = watch
        self._pending = b""

    def read(self) -> bool:
        """Carries on what there is now; False at the end."""
        while True:
            try:
                data = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._pending = (self._pending + data).split(b"\n")
            if len(self._pending) > _LONGEST_LINE:
                lines.append(self._pending)
                self._pending = b""
            self._write(lines)

    def finish(self) -> None:
        """Writes a last line that has no end."""
        if self._pending:
            self._write([self._pending])
            self._pending = b""

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            self._watch(line)
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        write_all(self._target, b"".join(self._tag + line + b"\n" for line in shown))


def say(message: str) -> None:
    """To the user, apart from what the instances print."""
    try:
        write_all(2, f"xopt-launch: {message}\n".encode())
    except ClosedOutput:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
