"""Runs a piece of Python in a process of its own: for what is decided once, at import or at the first call."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python <arguments>` with these environment variables on top, XOPT_MAX_ISA taken out unless it is among them."""
    inherited = {name: value for name, value in os.environ.items() if name != "XOPT_MAX_ISA"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env={**inherited, **environment}
    )


def start(program: str) -> subprocess.Popen[str]:
    """The program on its way, for several at once."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def output_of(program: str, **environment: str) -> str:
    """What the program prints; an error with all that it said where it fails."""
    done = run("-c", textwrap.dedent(program), **environment)
    assert done.returncode == 0, f"the process ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout.strip()
