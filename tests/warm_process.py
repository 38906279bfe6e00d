"""python -m tests.warm_process FD: imports torch, then becomes one fresh process after the other. See fresh_process.py.

What to run comes over the socket FD, along with the files for stdout and stderr; the answer is the exit status. Each is
carried out by a fork, which ends as an interpreter ends. This process itself computes nothing, so no threads are lost.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import runpy
import socket
import sys
import types

import torch  # noqa: F401 - this is what takes long

LARGEST_REQUEST = 1 << 20


def next_task(connection: socket.socket) -> tuple[list[str], dict[str, str]] | None:
    """The arguments and environment of the fork in which this returns; None where nobody asks any more."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 2)
        if not message:
            return None
        child = os.fork()
        if child == 0:
            connection.close()
            for given, standard in zip(files, (1, 2), strict=True):
                os.dup2(given, standard)
                os.close(given)
            arguments, environment = json.loads(message)
            return arguments, environment
        for file in files:
            os.close(file)
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def carry_out(arguments: list[str], environment: dict[str, str]) -> None:
    """As `python <arguments>` in this environment."""
    os.environ.clear()
    os.environ.update(environment)
    what, *rest = arguments
    sys.argv = [what, *rest]
    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(pathlib.Path(what).parent)
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    gc.freeze()  # or a fork that collects garbage would copy all that torch has made
    task = next_task(socket.socket(fileno=int(sys.argv[1])))
    if task is not None:
        carry_out(*task)
