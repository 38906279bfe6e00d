"""Distributed runs: what torchrun is told, and real ones with two processes."""

from __future__ import annotations

import json
import pathlib
import time

import pytest

from tests import launched
from tests.fresh_process import ROOT
from tests.launched import launch, script

# Each gets a core of its own where there are two.
TWO = ("--nproc-per-node", 2, "--oversubscribe")

SHOWS_ITS_SHARE = """
    import os, sys
    line = next(line for line in open("/proc/self/status") if line.startswith("Cpus_allowed_list"))
    rank, threads = os.environ["RANK"], os.environ["OMP_NUM_THREADS"]
    sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']}: CPUs {line.split()[1]}, {threads} threads\\n")
"""


def handed_over(tmp_path: pathlib.Path, *chosen: object) -> tuple[list[str], list[dict[str, object]]]:
    done = launch(*chosen, "--dry-run", "--json", script(tmp_path, "pass"), "argument")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    return data["elastic"], data["instances"]


def test_one_machine(tmp_path: pathlib.Path) -> None:
    command, ranks = handed_over(tmp_path, *TWO)
    assert command[1:6] == ["-u", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    assert command[-2:] == [str(tmp_path / "script.py"), "argument"]
    assert [rank["index"] for rank in ranks] == [0, 1]


def test_several_machines(tmp_path: pathlib.Path) -> None:
    chosen = ("--nnodes", 2, "--node-rank", 1, "--master-addr", "first", "--master-port", 1234)
    command, _ = handed_over(tmp_path, *TWO, *chosen)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=first", "--master-port=1234"} <= set(command)
    assert "--standalone" not in command
    command, _ = handed_over(tmp_path, *TWO, "--nnodes", "1:4", "--rdzv-endpoint", "first:29400")
    assert {"--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=first:29400"} <= set(command)


def test_the_mode_sets_the_number_of_ranks(tmp_path: pathlib.Path) -> None:
    command, ranks = handed_over(tmp_path, "--throughput-mode", "--nnodes", 1)
    assert f"--nproc-per-node={len(ranks)}" in command


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (["--nnodes", "2"], "--nnodes 2: needs --master-addr and --node-rank, or --rdzv-endpoint"),
        (["--nnodes", "two"], "--nnodes: expected a number or MIN:MAX, got 'two'"),
        (["--nproc-per-node", "0"], "--nproc-per-node: expected 1 or more, got 0"),
        (["--nproc-per-node", "2", "--ninstances", "2"], "--ninstances: not in a distributed run"),
        (["--nproc-per-node", "2", "--benchmark"], "--benchmark: not in a distributed run"),
        (["--rdzv-endpoint", "a:1", "--master-addr", "b"], "it is one or the other"),
        (["--nproc-per-node", "2", "--latency-mode"], "the mode sets the number by itself"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(chosen: list[str], said: str, tmp_path: pathlib.Path) -> None:
    done = launch(*chosen, script(tmp_path, "pass"))
    assert done.returncode == 2
    assert said in done.stderr


def test_each_local_rank_is_on_its_cores(tmp_path: pathlib.Path) -> None:
    _, ranks = handed_over(tmp_path, *TWO)
    done = launch(*TWO, script(tmp_path, SHOWS_ITS_SHARE))
    assert done.returncode == 0, done.stderr
    expected = [f"rank {i} of 2: CPUs {rank['cpus']}, {rank['threads']} threads" for i, rank in enumerate(ranks)]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_rank_that_fails_fails_the_run(tmp_path: pathlib.Path) -> None:
    program = """
        import os, time
        if os.environ["RANK"] == "1":
            raise SystemExit(3)
        time.sleep(1000)
    """
    done = launch(*TWO, script(tmp_path, program))
    assert done.returncode == 1, "torchrun's own"
    assert "exitcode  : 3" in done.stderr


def test_no_rank_outlives_the_launcher(tmp_path: pathlib.Path) -> None:
    """torchrun puts each into a session of its own."""
    program = """
        import sys, time
        sys.stdout.write("ready\\n")
        time.sleep(1000)
    """
    with launched.started(*TWO, script(tmp_path, program)) as launcher:
        assert launcher.lines(2) == {"ready"}
    while launched.left_of(launcher.mark):
        time.sleep(0.01)


@pytest.mark.parametrize("example", ["ddp_inference", "ddp_training", "tensor_parallel"])
def test_examples_with_two_processes(example: str) -> None:
    done = launch(*TWO, ROOT / "examples" / f"{example}.py")
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout or "rank 1: 32 rows" in done.stdout
