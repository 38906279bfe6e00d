"""Starts the launcher as a user does, on small scripts, and finds what it may have left behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator

MARK = "XOPT_TEST_RUN"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "xopt_launch", *map(str, arguments)]


def environment(mark: str, **variables: str) -> dict[str, str]:
    """The test's own, but for settings that would stand in the launcher's way."""
    ours = ("OMP_", "KMP_", "GOMP_", "LD_PRELOAD", "MALLOC_CONF", "XOPT_LAUNCH_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**inherited, "COLUMNS": "200", MARK: mark, **variables}


def launch(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the launcher to its end, and looks that nothing of it is left."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=environment(mark, **variables),
        stdin=subprocess.DEVNULL,
    )
    assert not left_of(mark)
    return done


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[Launcher]:
    """A launcher that runs; a test that fails leaves none behind."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(mark)
    )
    try:
        yield Launcher(process, mark)
    finally:
        process.kill()
        process.communicate()


class Launcher:
    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        self.process = process
        self.mark = mark
        assert process.stdout is not None
        assert process.stderr is not None
        self.stdout, self.stderr = process.stdout, process.stderr

    def lines(self, count: int) -> set[str]:
        """The next lines of its output."""
        return {self.stdout.readline().rstrip("\n") for _ in range(count)}

    def end(self) -> int:
        """Waits for it, and looks that nothing of it is left; the exit status."""
        self.process.wait()
        assert not left_of(self.mark)
        return self.process.returncode


def left_of(mark: str) -> list[int]:
    """The processes that a run with this mark has left: all that it starts inherit the mark."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if needle in (directory / "environ").read_bytes() and directory.name != str(os.getpid()):
                found.append(int(directory.name))
        except OSError:  # it has ended, or belongs to somebody else
            continue
    return found


def script(folder: pathlib.Path, program: str, name: str = "script.py") -> pathlib.Path:
    path = folder / name
    path.write_text(textwrap.dedent(program))
    return path
