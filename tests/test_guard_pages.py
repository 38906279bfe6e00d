"""No kernel reads or writes outside its buffers: inputs, weights and outputs that touch a forbidden page.

Each test runs its calls in a process of its own, so that a fault is a failed test and not the end of the run; the last
line that such a process printed names the call. The results are compared with those on plain memory, so a kernel that
reads beyond a row into the next cannot hide either.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

from tests import fresh_process
from xopt import _C

LEVELS = list(_C.isa_levels())
PRESENT = LEVELS[: LEVELS.index(_C.detected_isa()) + 1]
FAULTS = (-11, -7, 139, 135)


def run_calls(level: str, mode: str, preload: pathlib.Path | None = None) -> None:
    environment = {"XOPT_MAX_ISA": level}
    if preload is not None:
        environment["LD_PRELOAD"] = f"{os.environ.get('LD_PRELOAD', '')} {preload}".strip()
    done = fresh_process.run_warm("-m", "tests.guarded_calls", mode, **environment)
    lines = done.stdout.splitlines()
    last = lines[-1] if lines else "nothing"
    why = "touched memory outside its buffers" if done.returncode in FAULTS else f"ended with {done.returncode}"
    assert done.returncode == 0, f"level {level}, {mode}: {why}; last said: {last}\n{done.stderr[-3000:]}"
    assert last.startswith("calls made: "), last
    assert int(last.removeprefix("calls made: ")) > 100


@pytest.mark.parametrize("level", PRESENT)
@pytest.mark.parametrize("side", [pytest.param("end", marks=pytest.mark.sanitize), "start"])
def test_inputs_at_a_guard_page(level: str, side: str) -> None:
    run_calls(level, side)


@pytest.fixture(scope="module")
def guarding_allocator(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("NOT RUN: no C compiler for the guarding allocator, so outputs are unproven here")
    library = tmp_path_factory.mktemp("guard") / "guarded_outputs.so"
    source = pathlib.Path(__file__).parent / "guarded_outputs.c"
    subprocess.run([compiler, "-O1", "-fPIC", "-shared", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("level", PRESENT)
def test_outputs_at_a_guard_page(level: str, guarding_allocator: pathlib.Path) -> None:
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer brings an allocator of its own, which guards outputs too")
    run_calls(level, "outputs", guarding_allocator)


def test_guard_pages_guard() -> None:
    """The canary: one byte further is a fault, on either side."""
    program = (
        "import ctypes, sys, torch\n"
        "from tests.guard_pages import GuardedMemory\n"
        "memory = GuardedMemory()\n"
        "x = memory.place(torch.zeros(100, dtype=torch.uint8), at_end=sys.argv[1] == 'end')\n"
        "ctypes.string_at(x.data_ptr() + int(sys.argv[2]), 1)\n"
        "print('read')\n"
    )
    for side, inside, outside in (("end", 99, 100), ("start", 0, -1)):
        for offset, faults in ((inside, False), (outside, True)):
            done = fresh_process.run("-c", program, side, str(offset))
            assert ("read" not in done.stdout) == faults
            assert (done.returncode != 0) == faults


def test_guarding_allocator_guards(guarding_allocator: pathlib.Path) -> None:
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer brings an allocator of its own")
    program = (
        "import ctypes, sys, torch\n"
        "library = ctypes.CDLL(None)\n"
        "library.guarded_outputs_switch(1)\n"
        "x = torch.zeros(1000, dtype=torch.uint8)\n"
        "library.guarded_outputs_switch(0)\n"
        "ctypes.memset(x.data_ptr() + int(sys.argv[1]), 1, 1)\n"
        "print('written', library.guarded_outputs_given_out())\n"
    )
    for offset, faults in ((999, False), (1000, True)):
        done = fresh_process.run_warm("-c", program, str(offset), LD_PRELOAD=str(guarding_allocator))
        assert (done.returncode != 0) == faults, done.stderr
        assert done.stdout.split() == ([] if faults else ["written", "1"])
