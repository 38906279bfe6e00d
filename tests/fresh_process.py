"""Runs a piece of Python in a process of its own: for what is decided once, at import or at the first call.

Most of the time that such a process takes goes into importing torch. So it is forked from one that has done that and
nothing else, unless something is different that is read before, or what is meant is the start itself (`run_cold`).
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parent.parent
# Variables of the loader, Python, malloc, the sanitizers, torch, and the OpenMP and math libraries that it brings.
READ_EARLY = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "ASAN_", "UBSAN_", "TORCH", "OMP_", "GOMP_", "KMP_", "MKL_")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python <arguments>` with these environment variables on top, XOPT_MAX_ISA taken out unless it is among them."""
    if started_as(_on_top(environment)) == started_as(os.environ):
        return run_warm(*arguments, **environment)
    return run_cold(*arguments, **environment)


def run_warm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Forked also where the start has to be another one, for tests that want the same several times: what they are
    forked from stays until the end."""
    wanted = _on_top(environment)
    return _forked(_warm_process(started_as(wanted))[0], arguments, wanted)


def run_cold(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same in an interpreter that has not imported torch."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=_on_top(environment))


def _on_top(environment: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "XOPT_MAX_ISA"}
    return {**inherited, **environment}


def output_of(program: str, **environment: str) -> str:
    """What the program prints; an error with all that it said where it fails."""
    return _output(run("-c", textwrap.dedent(program), **environment))


def output_of_cold(program: str, **environment: str) -> str:
    return _output(run_cold("-c", textwrap.dedent(program), **environment))


def _output(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"the process ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


Start = tuple[frozenset[tuple[str, str]], frozenset[int]]


def started_as(environment: Mapping[str, str]) -> Start:
    """What a process has read of its surroundings by the time that it has imported torch."""
    early = frozenset((name, value) for name, value in environment.items() if name.startswith(READ_EARLY))
    return early, frozenset(os.sched_getaffinity(0))


@functools.cache
def _warm_process(start: Start) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """How to ask it. It ends with this process, which closes the connection."""
    connection, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.warm_process", str(its_end.fileno())]
    late = {name: value for name, value in os.environ.items() if not name.startswith(READ_EARLY)}
    environment = {**late, **dict(start[0])}
    with its_end:
        fds = [its_end.fileno()]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=fds, stdout=subprocess.DEVNULL, env=environment)
    return connection, process


def _forked(
    connection: socket.socket, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        request = json.dumps([arguments, environment]).encode()
        socket.send_fds(connection, [request], [out.fileno(), err.fileno()])
        status = connection.recv(100)
        assert status, "the process that others are forked from has died"
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([sys.executable, *arguments], int(status), out.read(), err.read())
