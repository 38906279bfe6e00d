"""Instances where the system denies what binds them: it is told once, and they run nevertheless."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import uuid

import pytest

from tests import launched
from tests.launched import script

CPUS = sorted(os.sched_getaffinity(0))[:2]

# Containers deny by a seccomp filter. This one has the calls that bind fail with EPERM, in this process and in whatever
# it becomes or starts. It says when it cannot be installed, and then becomes the command of its arguments.
UNDER_A_FILTER = """
    import ctypes, errno, os, struct, sys

    ALLOW, FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM
    LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
    denied = (238, 237, 203)  # x86-64: set_mempolicy, mbind, sched_setaffinity
    steps = [(LOAD_NUMBER, 0, 0, 0)]
    steps += [(JUMP_IF_EQUAL, len(denied) - place, 0, number) for place, number in enumerate(denied)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(steps), ctypes.addressof(code))
    NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
    zero = ctypes.c_ulong(0)
    if libc.prctl(NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero) or libc.prctl(
        SECCOMP, ctypes.c_ulong(FILTER), ctypes.byref(program), zero, zero
    ):
        print("no seccomp:", os.strerror(ctypes.get_errno()), file=sys.stderr)
        raise SystemExit(99)
    os.execv(sys.argv[1], sys.argv[1:])
"""


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def under_a_filter(*arguments: object) -> subprocess.CompletedProcess[str]:
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNDER_A_FILTER), *launched.command(*arguments)],
        capture_output=True,
        text=True,
        env=launched.environment(mark),
        stdin=subprocess.DEVNULL,
    )
    if done.returncode == 99 and done.stderr.startswith("no seccomp:"):
        pytest.skip(f"NOT RUN: {done.stderr.strip()}")
    assert not launched.left_of(mark)
    return done


def test_a_seccomp_filter_is_told_once_and_does_no_harm(tmp_path: pathlib.Path) -> None:
    program = """
        import os
        try:
            os.sched_setaffinity(0, {%d})
        except PermissionError:
            print("ran where binding is denied, on", *sorted(os.sched_getaffinity(0)))
    """
    listed = ("--cores-list", ",".join(map(str, CPUS)), "--ncores-per-instance", 1, "--bind-numa-node")
    done = under_a_filter(*listed, script(tmp_path, program % CPUS[0]))
    everywhere = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    tags = [f"[{index}] " for index in range(len(CPUS))] if len(CPUS) > 1 else [""]
    assert lines_of(done) == [f"{tag}ran where binding is denied, on {everywhere}" for tag in tags]
    complaints = [line.split(": ")[1:4] for line in done.stderr.splitlines()]
    calls = ["sched_setaffinity", "set_mempolicy"][len(CPUS) == 1 :]  # one that is on its only CPU needs no call
    assert complaints == [["denied", call, "Operation not permitted"] for call in calls], done.stderr


def test_torchs_threads_run_under_a_seccomp_filter(tmp_path: pathlib.Path) -> None:
    """libgomp would bind them by the same call."""
    program = """
        import torch, xopt
        model = xopt.optimize(torch.nn.Linear(64, 64).eval(), dtype=torch.bfloat16)
        with torch.inference_mode():
            print(*model(torch.ones(3, 64)).shape)
    """
    done = under_a_filter("--memory-allocator", "pool", script(tmp_path, program))
    assert lines_of(done) == ["3 64"]
    if os.sched_getaffinity(0) == set(CPUS):
        assert "denied" not in done.stderr, "there is nothing to bind, but for torch's threads"


def test_ranks_of_a_distributed_run_under_a_seccomp_filter(tmp_path: pathlib.Path) -> None:
    done = under_a_filter("--nproc-per-node", len(CPUS), script(tmp_path, "import os; os.write(1, b'ran\\n')"))
    assert lines_of(done) == ["ran"] * len(CPUS)
    assert done.stderr.count("denied: sched_setaffinity") == (len(CPUS) > 1), done.stderr


def test_denied_calls_are_told_once_and_do_no_harm(tmp_path: pathlib.Path) -> None:
    """A CPU and a node that cannot be are denied as a container denies real ones."""
    mark = uuid.uuid4().hex
    program = """
        import sys, xopt_launch
        xopt_launch.enter_package()
        from xopt.launch import plan, process
        memory = plan.MemoryPolicy("bind", (900,))
        command = (sys.executable, "-c", "print('ran')")
        instances = tuple(plan.Instance(i, (99999,), 1, (0,), memory, "default", {}, command) for i in range(3))
        result = process.run(instances, process.Manner(say=lambda text: print("said", text, flush=True)))
        print("status", result.status)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=launched.environment(mark),
    )
    said = lines_of(done)
    assert [line for line in said if line.endswith("ran")] == ["[0] ran", "[1] ran", "[2] ran"]
    complaints = [line for line in said if line.startswith("said denied")]
    assert [complaint.split()[2] for complaint in complaints] == ["sched_setaffinity:", "set_mempolicy:"]
    assert "status 0" in said
