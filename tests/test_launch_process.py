"""Real instances: where they run, how they end, what they say, and that nothing is left of them."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import pytest

from tests import launched
from tests.launched import launch, script
from xopt.launch import topology

CPUS = sorted(os.sched_getaffinity(0))
TWO = ("--ninstances", 2, "--oversubscribe")

# Says that it is there, and waits to be ended.
WAITS = """
    import time
    print("ready")
    while True:
        time.sleep(1000)
"""
FAILS_IN_ONE = """
    import os, signal, time
    if os.environ["XOPT_LAUNCH_INSTANCE"] == "1":
        {failure}
    while {others_wait}:
        time.sleep(1000)
"""


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


# ---- Binding --------------------------------------------------------------------------------------------------------


def test_each_instance_runs_on_its_cores(tmp_path: pathlib.Path) -> None:
    program = """
        for line in open("/proc/self/status"):
            if line.startswith("Cpus_allowed_list"):
                print(line.split()[1])
    """
    chosen = CPUS[-2:]
    listed = ("--cores-list", ",".join(map(str, chosen)), "--ncores-per-instance", 1)
    done = launch(*listed, script(tmp_path, program))
    tags = [f"[{index}] " for index in range(len(chosen))] if len(chosen) > 1 else [""]
    assert lines_of(done) == [f"{tag}{cpu}" for tag, cpu in zip(tags, chosen, strict=True)]


def test_torchs_threads_have_a_core_each(tmp_path: pathlib.Path) -> None:
    program = """
        import glob, torch
        torch.ones(1 << 22).add_(1)
        for path in glob.glob("/proc/self/task/*/status"):
            for line in open(path):
                if line.startswith("Cpus_allowed_list"):
                    print(line.split()[1])
    """
    done = launch("--memory-allocator", "default", script(tmp_path, program))
    found = topology.read_own()
    if found.quota is not None and found.quota < len(found.cores):
        pytest.skip("NOT RUN: threads are not bound under a quota")
    assert lines_of(done) == sorted(str(core.cpus[0]) for core in found.cores if not core.efficient or not found.hybrid)


def test_memory_is_bound_to_the_node(tmp_path: pathlib.Path) -> None:
    done = launch("--bind-numa-node", script(tmp_path, 'print(open("/proc/self/numa_maps").readline().split()[1])'))
    if "denied: set_mempolicy" in done.stderr or "numa_maps" in done.stderr:
        pytest.skip("NOT RUN: memory policies are denied here, or not shown")
    assert re.fullmatch(r"bind[^:]*:\d[\d,-]*", done.stdout.strip())


# ---- Ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [
        ("raise SystemExit(3)", 3, "ended with status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    ],
    ids=["exit", "SIGSEGV", "SIGKILL"],
)
def test_a_failure_stops_the_others_and_gives_its_status(
    failure: str, status: int, said: str, tmp_path: pathlib.Path
) -> None:
    program = FAILS_IN_ONE.format(failure=failure, others_wait=True)
    done = launch(*TWO, script(tmp_path, program))
    assert done.returncode == status
    assert f"instance 1 {said}; stopping the others" in done.stderr


def test_the_others_may_go_on(tmp_path: pathlib.Path) -> None:
    program = """
        import os, pathlib, sys, time
        note = pathlib.Path(sys.argv[1])
        if os.environ["XOPT_LAUNCH_INSTANCE"] == "1":
            pathlib.Path(f"{note}.new").write_text(str(os.getpid()))
            os.rename(f"{note}.new", note)
            raise SystemExit(7)
        while not note.exists() or os.path.exists(f"/proc/{note.read_text()}"):
            time.sleep(0.01)
        time.sleep(0.2)  # time to be stopped in
        print("finished")
    """
    chosen = ("--ninstances", 3, "--oversubscribe", "--on-failure", "continue")
    done = launch(*chosen, script(tmp_path, program), tmp_path / "note")
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) == ["[0] finished", "[2] finished"]
    assert "stopping" not in done.stderr


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
def test_signals_reach_the_instances(number: int, status: int, tmp_path: pathlib.Path) -> None:
    with launched.started(*TWO, script(tmp_path, WAITS)) as launcher:
        assert launcher.lines(2) == {"[0] ready", "[1] ready"}
        launcher.process.send_signal(number)
        assert launcher.end() == status


def test_an_instance_that_ends_well_on_a_signal_is_no_failure(tmp_path: pathlib.Path) -> None:
    program = """
        import signal, sys, time
        def end(*_):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("ready")
        time.sleep(1000)
    """
    with launched.started(script(tmp_path, program)) as launcher:
        assert launcher.lines(1) == {"ready"}
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.lines(1) == {"saved"}
        assert launcher.end() == 0


IGNORES = """
    import signal, time
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    print("ready")
    while True:
        time.sleep(1000)
"""


def test_one_that_ignores_the_signal_is_killed_after_the_grace_period(tmp_path: pathlib.Path) -> None:
    with launched.started("--grace-period", 0.2, script(tmp_path, IGNORES)) as launcher:
        assert launcher.lines(1) == {"ready"}
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 137


def test_a_second_signal_kills_at_once(tmp_path: pathlib.Path) -> None:
    """The grace period would outlast the test; a signal that is merely sent twice must not do it."""
    with launched.started("--grace-period", 100000, *TWO, script(tmp_path, IGNORES)) as launcher:
        assert launcher.lines(2) == {"[0] ready", "[1] ready"}
        launcher.process.send_signal(signal.SIGINT)
        launcher.process.send_signal(signal.SIGINT)
        time.sleep(1.2)
        assert launcher.process.poll() is None
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 137


def test_what_an_instance_leaves_behind_ends_with_it(tmp_path: pathlib.Path) -> None:
    program = """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print("started")
    """
    assert lines_of(launch(*TWO, script(tmp_path, program))) == ["[0] started", "[1] started"]


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: pathlib.Path) -> None:
    """The instances, and also what they have started."""
    program = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print("ready")
        child.wait()
    """
    path = script(tmp_path, program)
    for _ in range(5):
        with launched.started(*TWO, path) as launcher:
            assert launcher.lines(2) == {"[0] ready", "[1] ready"}
            while len(launched.left_of(launcher.mark)) < 6:  # launcher, guard, and two instances with a child each
                assert launcher.process.poll() is None
        while launched.left_of(launcher.mark):
            time.sleep(0.01)


def test_a_hundred_runs_leave_nothing() -> None:
    """Ends of all kinds, within one process that would see a leak of children, descriptors or handlers."""
    mark = uuid.uuid4().hex
    program = """
        import os, signal, xopt_launch
        xopt_launch.enter_package()
        from xopt.launch import plan, process
        commands = [
            ("true",), ("false",), ("sh", "-c", "kill -SEGV $$"), ("sh", "-c", "sleep 1000 & exit 4"),
            ("sh", "-c", "sleep 1000 & true"),
        ]
        memory = plan.MemoryPolicy("local")
        statuses, open_before = [], len(os.listdir("/proc/self/fd"))
        manner = process.Manner(say=lambda text: None)
        for turn in range(100):
            command = commands[turn % len(commands)]
            instances = tuple(
                plan.Instance(i, tuple(os.sched_getaffinity(0)), 1, (0,), memory, "default", {}, command)
                for i in range(2)
            )
            statuses.append(process.run(instances, manner).status)
        assert statuses == [0, 1, 139, 4, 0] * 20, statuses
        assert len(os.listdir("/proc/self/fd")) == open_before
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no child")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=launched.environment(mark),
    )
    assert lines_of(done) == ["no child"]
    assert not launched.left_of(mark)


# ---- Output ---------------------------------------------------------------------------------------------------------


def test_32_instances_on_two_cores(tmp_path: pathlib.Path) -> None:
    program = """
        import os
        for number in range(50):
            print(os.environ["XOPT_LAUNCH_INSTANCE"], number)
    """
    cores = ",".join(map(str, CPUS[:2]))
    done = launch("--cores-list", cores, "--ninstances", 32, "--oversubscribe", script(tmp_path, program))
    expected = sorted(f"[{index}] {index} {number}" for index in range(32) for number in range(50))
    assert lines_of(done) == expected


def test_32_instances_on_two_cores_are_refused_otherwise(tmp_path: pathlib.Path) -> None:
    cores = CPUS[:2]
    done = launch("--cores-list", ",".join(map(str, cores)), "--ninstances", 32, script(tmp_path, WAITS))
    assert done.returncode == 2
    assert f"32 instances of 1 cores need 32 cores, and {len(cores)} are usable" in done.stderr


def test_lines_come_whole_and_with_their_instance(tmp_path: pathlib.Path) -> None:
    program = r"""
        import os, sys
        for piece in ("a", "b\n", "step 1\rstep 2\rstep 3\r\n", "", "no end"):
            os.write(1, piece.encode())
        os.write(2, b"complaint\n")
    """
    done = launch(*TWO, script(tmp_path, program))
    assert lines_of(done) == sorted(f"[{index}] {line}" for index in range(2) for line in ("ab", "step 3", "no end"))
    assert sorted(done.stderr.splitlines()) == ["[0] complaint", "[1] complaint"]


def test_one_instance_writes_for_itself(tmp_path: pathlib.Path) -> None:
    done = launch(script(tmp_path, 'print("as it is", end="")'))
    assert done.stdout == "as it is"


def test_log_files_are_complete_to_the_last_line(tmp_path: pathlib.Path) -> None:
    """Even where the instance is killed after it."""
    program = """
        import os, signal, sys
        for number in range(20000):
            print("line", number)
        print("the end", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    logs = tmp_path / "logs/deep"
    chosen = ("--on-failure", "continue", "--log-dir", logs, "--log-file-prefix", "mine")
    done = launch(*TWO, *chosen, script(tmp_path, program))
    assert done.returncode == 137
    assert done.stdout == ""
    for index in range(2):
        lines = (logs / f"mine_instance_{index}.log").read_text().splitlines()
        assert lines == [*(f"line {number}" for number in range(20000)), "the end"]


def test_a_reader_that_goes_away_ends_the_run(tmp_path: pathlib.Path) -> None:
    with launched.started(*TWO, script(tmp_path, 'while True:\n    print("more")')) as launcher:
        assert launcher.lines(1) <= {"[0] more", "[1] more"}
        launcher.stdout.close()
        assert "closed by its reader" in launcher.stderr.readline()
        assert launcher.end() == 141


def test_closed_standard_streams(tmp_path: pathlib.Path) -> None:
    """What is opened next would get their numbers, and be written to."""
    mark = uuid.uuid4().hex
    log = tmp_path / "logs"
    path = script(tmp_path, 'print("said")')
    status = subprocess.run(
        launched.command(*TWO, "--log-dir", log, "--log-file-prefix", "a", path),
        env=launched.environment(mark),
        preexec_fn=lambda: os.closerange(0, 3),
    ).returncode
    assert status == 0
    assert [(log / f"a_instance_{index}.log").read_text() for index in range(2)] == ["said\n", "said\n"]
    silent = subprocess.run(
        launched.command(*TWO, path), env=launched.environment(mark), preexec_fn=lambda: os.closerange(0, 3)
    )
    assert silent.returncode == 0


def test_a_program_that_is_not_there(tmp_path: pathlib.Path) -> None:
    done = launch(*TWO, "--no-python", tmp_path / "nothing")
    assert done.returncode == 2
    assert "cannot start" in done.stderr
    assert "No such file" in done.stderr
