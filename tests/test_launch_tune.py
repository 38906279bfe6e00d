"""`xopt-launch tune` and `--config`: what is tried, what is written, and what a file may say."""

from __future__ import annotations

import json
import os
import pathlib
import signal
from typing import Any

import pytest

from tests import launched
from tests.launched import launch, script
from xopt.launch import configuration, options
from xopt.launch.errors import LaunchError

CPUS = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CPUS) < 2, reason="NOT RUN: there is one CPU only")
TWO = ("--cores-list", ",".join(map(str, CPUS[:2])), "--memory-allocator", "default")

# Two instances of one core: 20 in sum; one of two cores: 15.
FASTER_IN_TWO = """
    import json, os
    number = int(os.environ["OMP_NUM_THREADS"])
    print("xopt-report", json.dumps({"throughput": 5 + 5 * number, "latency_ms": 10 / number}))
"""


def tuned(folder: pathlib.Path, program: str, *chosen: object) -> tuple[dict[str, Any], str]:
    path = folder / "best.json"
    done = launch("tune", "--write", path, *chosen, script(folder, program))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stderr


@two_cores
def test_the_best_number_of_instances_for_throughput(tmp_path: pathlib.Path) -> None:
    found, said = tuned(tmp_path, FASTER_IN_TWO, *TWO)
    assert found["options"] == {"ninstances": 2, "ncores-per-instance": 1}
    assert [trial["score"] for trial in found["trials"][:2]] == [15, 20]
    assert "ninstances 2, ncores-per-instance 1: 20 (best)" in said


@two_cores
def test_the_best_number_of_instances_for_latency(tmp_path: pathlib.Path) -> None:
    found, _ = tuned(tmp_path, FASTER_IN_TWO, *TWO, "--objective", "latency")
    assert found["options"] == {"ninstances": 1, "ncores-per-instance": 2}
    assert [trial["score"] for trial in found["trials"][:2]] == [-5, -10]


@two_cores
def test_what_changes_nothing_is_not_tried(tmp_path: pathlib.Path) -> None:
    """With one core each there is nothing to bind threads to that the affinity has not said."""
    found, _ = tuned(tmp_path, FASTER_IN_TWO, *TWO)
    assert not [trial for trial in found["trials"] if trial["options"].get("bind-threads") is False]


@two_cores
def test_what_the_command_line_says_is_not_varied(tmp_path: pathlib.Path) -> None:
    found, _ = tuned(tmp_path, FASTER_IN_TWO, *TWO, "--ninstances", 1)
    assert found["options"] == {}
    assert all("ninstances" not in trial["options"] for trial in found["trials"])


def test_allocators_are_tried(tmp_path: pathlib.Path) -> None:
    """A library of that name is enough: the script says which it was given."""
    library = tmp_path / "libjemalloc.so.2"
    library.touch()
    program = 'import os; print("xopt-report", \'{"throughput": %d}\' % (1 + ("MALLOC_CONF" in os.environ)))'
    path = tmp_path / "best.json"
    chosen = ("--cores-list", CPUS[0], "--omp-runtime", "default", "--write", path)
    done = launch("tune", *chosen, script(tmp_path, program), LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    tried = [trial["options"].get("memory-allocator", "auto") for trial in json.loads(path.read_text())["trials"]]
    assert {"auto", "default"} <= set(tried)


def test_the_budget_ends_it(tmp_path: pathlib.Path) -> None:
    found, said = tuned(tmp_path, "import time; time.sleep(0.3)", "--budget", 0.4)
    assert len(found["trials"]) == 1
    assert found["trials"][0]["score"] == pytest.approx(1 / 0.3, rel=0.9)
    assert len(CPUS) == 1 or "the budget of 0.4 s is used up" in said


def test_a_script_that_fails_is_told_at_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "best.json"
    done = launch("tune", "--write", path, script(tmp_path, "raise SystemExit('this is wrong')"))
    assert done.returncode == 1
    assert "this is wrong" in done.stderr
    assert not path.exists()


def test_an_interruption_ends_it(tmp_path: pathlib.Path) -> None:
    program = """
        import pathlib, sys, time
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(1000)
    """
    note = tmp_path / "note"
    with launched.started("tune", "--write", tmp_path / "best.json", script(tmp_path, program), note) as launcher:
        while not note.exists():
            assert launcher.process.poll() is None
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 130


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (["--benchmark"], "--benchmark: not while tuning"),
        (["--budget", "0"], "--budget: expected more than 0 seconds, got 0"),
        (["--objective", "latency"], "--objective latency: the script tells none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(chosen: list[str], said: str, tmp_path: pathlib.Path) -> None:
    done = launch("tune", *chosen, script(tmp_path, "pass"))
    assert done.returncode == 2
    assert said in done.stderr


# ---- Files ----------------------------------------------------------------------------------------------------------


def test_a_file_gives_options_and_the_command_line_wins(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "options.json"
    path.write_text('{"options": {"ninstances": 4, "bind-threads": false, "memory-allocator": "default"}}')
    chosen = configuration.parse(options.build_parser(), ["--config", str(path), "--ninstances", "2", "s.py", "--x"])
    assert (chosen.ninstances, chosen.bind_threads, chosen.memory_allocator) == (2, False, "default")
    assert chosen.arguments == ["--x"]


def test_every_option_of_a_file_is_one_of_the_command_line() -> None:
    known = vars(options.build_parser().parse_args(["s.py"]))
    assert {name.replace("-", "_") for name in configuration.KINDS} <= set(known)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", 'expected an object with an object "options" in it'),
        ('{"options": {"instances": 1}}', "unknown option 'instances'; known are ninstances"),
        ('{"options": {"ninstances": "4"}}', 'ninstances: expected int, got "4"'),
        ('{"options": {"ninstances": true}}', "ninstances: expected int, got true"),
        ('{"options": {"strategy": "far"}}', "strategy: expected one of scatter, close, got 'far'"),
    ],
)
def test_files_that_are_refused(text: str, said: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        configuration.parse(options.build_parser(), ["--config", str(path), "s.py"])
    assert said in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LaunchError, match=r"--config: cannot read .*: No such file"):
        configuration.parse(options.build_parser(), ["--config", str(tmp_path / "none"), "s.py"])
