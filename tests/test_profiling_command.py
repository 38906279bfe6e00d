"""`xopt-profile` as a command: unchanged scripts, however they end, and what is written of them."""

from __future__ import annotations

import json
import os
import pathlib
import signal
from typing import Any

import pytest

from tests import fresh_process
from xopt.profiling import Profile

_SCRIPT = """
import os, signal, sys, threading, torch
print("arguments", sys.argv[1:], __name__)
torch.ones(128, 128) @ torch.ones(128, 128)
if "threads" in sys.argv:
    threads = [threading.Thread(target=lambda: torch.ones(96, 96) @ torch.ones(96, 96)) for _ in range(3)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
if "interrupt" in sys.argv:
    os.kill(os.getpid(), signal.SIGINT)
if "fail" in sys.argv:
    raise RuntimeError("half-way")
sys.exit(3 if "exit" in sys.argv else 0)
"""


@pytest.mark.parametrize(("argument", "status", "error"), [("go", 0, None), ("exit", 3, "SystemExit: 3")])
def test_a_script_is_profiled_and_keeps_its_exit_status(
    tmp_path: pathlib.Path, argument: str, status: int, error: str | None
) -> None:
    taken, done = run_script(tmp_path, argument)
    assert done.returncode == status, done.stderr
    assert f"arguments ['{argument}'] __main__" in done.stdout
    assert taken.error == error
    assert any(kernel.flop == 2 * 128**3 for kernel in taken.kernels)


def test_a_script_that_raises_half_way_keeps_the_profile_so_far(tmp_path: pathlib.Path) -> None:
    taken, done = run_script(tmp_path, "fail")
    assert done.returncode == 1
    assert "RuntimeError: half-way" in done.stderr
    assert taken.error == "RuntimeError: half-way"
    assert any(kernel.flop == 2 * 128**3 for kernel in taken.kernels)


def test_threads_that_a_script_starts_are_seen_and_times_still_add_up(tmp_path: pathlib.Path) -> None:
    taken, done = run_script(tmp_path, "threads")
    assert done.returncode == 0, done.stderr
    assert sum(kernel.calls for kernel in taken.kernels if kernel.flop == 2 * 96**3) == 3
    products = [row for row in taken.timeline if row[5] == "gemm"]
    assert len({row[3] for row in products}) > 1
    total = sum(category.seconds for category in taken.categories.values())
    assert total == pytest.approx(taken.wall_seconds)


def run_script(folder: pathlib.Path, argument: str, *others: str) -> tuple[Profile, Any]:
    script, data = folder / "script.py", folder / "profile.json"
    script.write_text(_SCRIPT)
    options = ["--no-roofs", "--json", str(data), *others, str(script), argument]
    done = fresh_process.run("-m", "xopt.profiling", *options)
    return Profile.from_json(data.read_text()), done


def test_an_interrupted_script_keeps_the_profile_so_far(tmp_path: pathlib.Path) -> None:
    taken, done = run_script(tmp_path, "interrupt")
    assert done.returncode == 128 + signal.SIGINT
    assert taken.error == "KeyboardInterrupt"
    assert any(kernel.flop == 2 * 128**3 for kernel in taken.kernels)


def test_a_report_and_a_trace_are_written_and_kernels_of_the_trace_are_replayed(tmp_path: pathlib.Path) -> None:
    page, trace, replayed = (tmp_path / name for name in ("report.html", "trace.json", "replayed.json"))
    taken, done = run_script(tmp_path, "fail", "--html", str(page), "--trace", str(trace))
    assert done.returncode == 1
    assert "RuntimeError: half-way" in page.read_text()
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])
    assert Profile.from_json(trace.read_text()).kernels == taken.kernels
    options = ["--kernel", "mm[f32] 128x128x128", "--all-instances", "--seconds", "0", "--json", str(replayed)]
    done = fresh_process.run("-m", "xopt.bench", "replay", str(trace), *options)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(replayed.read_text())
    assert {"what ran", "xopt"} <= set(result["cold"])
    assert any(name.startswith("xopt, ") for name in result["cold"])
    assert result["name"] in done.stdout


def test_a_module_is_profiled_as_python_runs_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "of_ours.py").write_text(_SCRIPT)
    data = tmp_path / "profile.json"
    options = ["--no-roofs", "--json", str(data), "-m", "of_ours", "go"]
    found_in = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = fresh_process.run("-m", "xopt.profiling", *options, PYTHONPATH=found_in)
    assert done.returncode == 0, done.stderr
    assert "arguments ['go'] __main__" in done.stdout
    assert any(kernel.flop == 2 * 128**3 for kernel in Profile.from_json(data.read_text()).kernels)


def test_a_wrong_command_line_is_told(tmp_path: pathlib.Path) -> None:
    for arguments, message in (([], "a script is needed"), ([str(tmp_path / "none.py")], "there is no file")):
        done = fresh_process.run("-m", "xopt.profiling", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
    for path in (tmp_path / "missing", tmp_path / "empty.json"):
        (tmp_path / "empty.json").write_text("{}")
        done = fresh_process.run("-m", "xopt.profiling", "--diff", str(path), str(path))
        assert done.returncode == 2
        assert "xopt-profile: --diff" in done.stderr


def test_two_profiles_are_compared(tmp_path: pathlib.Path) -> None:
    files = [tmp_path / "before", tmp_path / "after"]
    for file, argument in zip(files, ("go", "threads"), strict=True):
        taken, _ = run_script(tmp_path, argument)
        file.write_text(taken.to_json())
    done = fresh_process.run("-m", "xopt.profiling", "--diff", *map(str, files))
    assert done.returncode == 0, done.stderr
    slower = done.stdout.partition("Slower kernels")[2].partition("Faster kernels")[0]
    assert any("mm[f32] 96x96x96" in line and "new" in line for line in slower.splitlines())
