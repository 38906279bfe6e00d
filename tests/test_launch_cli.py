"""The launcher's command line: what it shows, what it takes, what it refuses, and what it sums up."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import fresh_process, launched
from tests.launched import launch, script
from xopt.launch import measure, options, report

CPUS = sorted(os.sched_getaffinity(0))
ONE_CORE = ("--cores-list", CPUS[0])
SHOWS_ARGUMENTS = "import sys; print(sys.argv[1:])"


# ---- What is run ----------------------------------------------------------------------------------------------------


def test_what_follows_the_script_is_the_scripts(tmp_path: pathlib.Path) -> None:
    done = launch(script(tmp_path, SHOWS_ARGUMENTS), "--ninstances", "5", "-m", "--", "--help")
    assert done.stdout.strip() == "['--ninstances', '5', '-m', '--', '--help']"


def test_a_module(tmp_path: pathlib.Path) -> None:
    script(tmp_path, SHOWS_ARGUMENTS, "some_module.py")
    done = launch("-m", "some_module", "a", PYTHONPATH=f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    assert done.stdout.strip() == "['a']"


def test_a_program() -> None:
    assert launch("--no-python", "echo", "$HOME", "*").stdout == "$HOME *\n", "no shell has seen it"


def test_as_a_part_of_the_package(tmp_path: pathlib.Path) -> None:
    done = fresh_process.run("-m", "xopt.launch", str(script(tmp_path, SHOWS_ARGUMENTS)), "b")
    assert done.stdout.strip() == "['b']", done.stderr


def test_the_launcher_loads_no_torch(tmp_path: pathlib.Path) -> None:
    """Neither it, nor anything else that takes long, but for the table of a summary."""
    program = f"""
        import sys, xopt_launch
        sys.argv = ["xopt-launch", "--ninstances", "2", "--oversubscribe", {str(script(tmp_path, "pass"))!r}]
        assert xopt_launch.main() == 0
        print(*sorted(sys.modules))
    """
    loaded = set(fresh_process.output_of_cold(program).split())
    assert "xopt.launch.cli" in loaded
    assert not loaded & {"torch", "numpy", "rich", "xopt.api", "xopt._C"}


def test_the_package_does_not_load_the_launcher() -> None:
    loaded = fresh_process.output_of("import sys, xopt; print(*sys.modules)").split()
    assert "xopt.api" in loaded
    assert not [name for name in loaded if name.startswith(("xopt.launch", "xopt_launch"))]


def test_the_installed_command() -> None:
    command = pathlib.Path(sys.executable).parent / "xopt-launch"
    if not command.exists():
        pytest.skip("NOT RUN: xopt is on the path, but not installed as a distribution")
    done = subprocess.run([command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "xopt-launch [options] script.py arguments..." in done.stdout


# ---- What is shown --------------------------------------------------------------------------------------------------


def test_help_is_grouped_and_has_examples() -> None:
    text = launch("--help").stdout
    for group in ("what is run:", "instances:", "cores and memory:", "libraries:", "course and output:", "examples:"):
        assert f"\n{group}\n" in text
    assert "xopt-launch --ninstances 4 script.py" in text


def test_the_examples_in_the_help_are_understood() -> None:
    examples = re.findall(r"^  xopt-launch (.*?)(?:   .*)?$", options.build_parser().epilog or "", re.MULTILINE)
    assert len(examples) > 4
    for example in examples:
        options.check(options.build_parser().parse_args(example.split()))


def test_a_dry_run_as_json_starts_nothing(tmp_path: pathlib.Path) -> None:
    path = script(tmp_path, "open('started', 'w')")
    logs = tmp_path / "logs"
    done = launch(*ONE_CORE, "--dry-run", "--json", "--log-dir", logs, "--log-file-prefix", "p", path, "argument")
    data = json.loads(done.stdout)
    (instance,) = data["instances"]
    assert instance["cpus"] == str(CPUS[0])
    assert instance["threads"] == 1
    assert instance["environment"]["OMP_NUM_THREADS"] == "1"
    assert instance["command"] == [sys.executable, "-u", str(path), "argument"]
    assert instance["log"] == str(logs / "p_instance_0.log")
    assert {"nodes", "memory", "allocator"} <= set(instance)
    assert any("--cores-list" in reason for reason in data["reasons"])
    assert not logs.exists()
    assert not pathlib.Path("started").exists()


def test_a_dry_run_as_a_table(tmp_path: pathlib.Path) -> None:
    done = launch("--ninstances", 2, "--oversubscribe", "--dry-run", script(tmp_path, "pass"))
    assert done.returncode == 0
    assert "OMP_NUM_THREADS=" in done.stdout
    assert "XOPT_LAUNCH_INSTANCE=1" in done.stdout
    assert "malloc" not in done.stdout, "reasons are for --explain"
    explained = launch("--dry-run", "--explain", "--memory-allocator", "default", script(tmp_path, "pass"))
    assert "The system's malloc (--memory-allocator default)." in explained.stdout


def test_explain_says_why_and_starts(tmp_path: pathlib.Path) -> None:
    done = launch(*ONE_CORE, "--explain", script(tmp_path, "print('ran')"))
    assert done.stdout == "ran\n"
    assert f"xopt-launch: CPUs {CPUS[0]} were asked for (--cores-list)." in done.stderr


def test_the_users_environment_wins_and_is_reported(tmp_path: pathlib.Path) -> None:
    path = script(tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'])")
    done = launch(*ONE_CORE, path, OMP_NUM_THREADS="17")
    assert done.stdout == "17\n"
    assert "OMP_NUM_THREADS=17 is set in the environment and kept; it would have been 1" in done.stderr


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (["--ninstances", "0"], "--ninstances: expected 1 or more, got 0"),
        (["--cores-list", "0-"], "expected numbers and ranges like 0-3,8, got '0-'"),
        (["--cores-list", "99999"], "--cores-list: 99999 cannot be used; usable are"),
        (["--instance-idx", "1"], "--instance-idx: expected 0 to 0, the last instance, got 1"),
        (["--grace-period", "-1"], "--grace-period: expected 0 or more seconds, got -1"),
        (["--json"], "--json: there is nothing to be shown"),
        (["--log-file-prefix", "a"], "--log-file-prefix: needs --log-dir"),
        (["--log-dir", "logs", "--log-file-prefix", "a/b"], "--log-file-prefix: expected a name without /"),
        (["--ninst", "2"], "unrecognized arguments: --ninst"),
        (["-m", "--no-python"], "not allowed with argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(chosen: list[str], said: str, tmp_path: pathlib.Path) -> None:
    done = launch(*chosen, script(tmp_path, "print('ran')"))
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_script_that_is_not_there() -> None:
    done = launch("nothing.py")
    assert done.returncode == 2
    assert "there is no script nothing.py (-m for a module, --no-python for a program)" in done.stderr


def test_a_log_directory_that_cannot_be(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    done = launch("--log-dir", tmp_path / "file/logs", script(tmp_path, "pass"))
    assert done.returncode == 2
    assert "--log-dir: cannot make" in done.stderr


# ---- What is summed up ----------------------------------------------------------------------------------------------

MEASURED = """
    import os, time
    index = int(os.environ["XOPT_LAUNCH_INSTANCE"])
    block = bytearray(50_000_000)
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    print("xopt-report", '{"throughput": 1}')
    print("xopt-report", '{"throughput": %d, "latency_ms": %d}' % (100 * (index + 1), index + 4))
"""


@pytest.mark.parametrize("logged", [False, True], ids=["terminal", "log files"])
def test_benchmark_as_json(logged: bool, tmp_path: pathlib.Path) -> None:
    """Standard output holds the JSON alone."""
    chosen = ("--log-dir", tmp_path) if logged else ()
    done = launch("--ninstances", 2, "--oversubscribe", "--benchmark", "--json", *chosen, script(tmp_path, MEASURED))
    data = json.loads(done.stdout)
    assert [one["throughput"] for one in data["instances"]] == [100, 200]
    assert [one["latency_ms"] for one in data["instances"]] == [4, 5]
    for one in data["instances"]:
        assert one["status"] == 0
        assert one["cpu_seconds"] >= 0.1
        assert one["cpu_seconds"] / one["wall_seconds"] == pytest.approx(one["cpus_used"])
        assert 50e6 < one["peak_bytes"] < 200e6
    assert data["total"]["throughput"] == 300
    assert data["total"]["latency_ms_mean"] == 4.5
    assert data["total"]["latency_ms_max"] == 5
    assert data["total"]["peak_bytes"] == sum(one["peak_bytes"] for one in data["instances"])
    assert ("[0] xopt-report" in done.stderr) == (not logged)


def test_benchmark_as_a_table_also_of_one_that_fails(tmp_path: pathlib.Path) -> None:
    done = launch("--benchmark", script(tmp_path, MEASURED + "    raise SystemExit(5)"))
    assert done.returncode == 5
    assert re.search(r"│\s+0 │\s+5 │.*│\s+100 │\s+4 │", done.stdout), done.stdout


def test_report_is_what_benchmark_reads(capfd: pytest.CaptureFixture[str]) -> None:
    report(throughput=12.5, latency_ms=80)
    report(latency_ms=70.0)
    one = measure.Measured(0)
    for line in capfd.readouterr().out.splitlines():
        one.watch(line.encode())
    assert (one.throughput, one.latency_ms) == (12.5, 70.0)


@pytest.mark.parametrize(
    "line", [b"xopt-report {", b"xopt-report [1]", b"xopt-report 3", b'xopt-report {"throughput": "x"}']
)
def test_lines_that_only_look_like_a_report(line: bytes) -> None:
    one = measure.Measured(0)
    one.watch(line)
    assert (one.throughput, one.latency_ms) == (None, None)


def test_report_takes_numbers_only() -> None:
    with pytest.raises(TypeError, match="report: throughput: expected a number, got str"):
        report(throughput="12")  # type: ignore[arg-type]


def test_nothing_is_left_of_the_marks_of_these_tests() -> None:
    """The search itself finds what is there."""
    mark = "canary"
    process = subprocess.Popen(["sleep", "1000"], env=launched.environment(mark))
    while process.pid not in launched.left_of(mark):
        assert process.poll() is None
    process.kill()
    process.wait()
