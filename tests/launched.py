"""Starts the launcher as a user does, on small scripts, and finds what it may have left behind."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import uuid
from typing import Any

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


def start(mark: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(mark), **options
    )


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
