"""The command line of `xopt-launch`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from xopt.launch import (
    allocator,
    distributed,
    libraries,
    local_rank,
    measure,
    openmp,
    options,
    output,
    placement,
    plan,
    process,
    show,
    topology,
)
from xopt.launch.errors import LaunchError

_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    output.open_missing_standard_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [distributed.BECOME_RANK]:
        local_rank.become(arguments[1:])
    parser = options.build_parser()
    chosen = parser.parse_args(arguments)
    try:
        options.check(chosen)
        made = build_plan(chosen)
        for warning in made.warnings:
            say(warning)
        if chosen.dry_run:
            show.print_plan(made, as_json=chosen.json, explain=chosen.explain)
            return 0
        if chosen.explain:
            for reason in made.reasons:
                say(reason)
        return _run(made, chosen)
    except LaunchError as error:
        say(f"error: {error}")
        return _USAGE_ERROR
    except BrokenPipeError:  # of a table that nobody reads
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return 130


def say(message: str) -> None:
    """To the user, apart from what the instances print."""
    try:
        output.write_all(2, f"xopt-launch: {message}\n".encode())
    except output.ClosedOutput:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def build_plan(chosen: argparse.Namespace) -> plan.Plan:
    machine = topology.read_own()
    request = options.request(chosen)
    placements = placement.place(machine, request)
    places = libraries.directories(os.environ)
    pool_places = [Path(__file__).parent.parent, *places] if chosen.memory_allocator == "pool" else places
    elastic = distributed.is_wanted(chosen)
    settings = plan.Settings(
        command=options.command(chosen),
        allocator=allocator.choose(chosen.memory_allocator, os.environ, pool_places),
        runtime=openmp.choose(chosen.omp_runtime, os.environ, places, openmp.torch_directory()),
        environment=os.environ,
        bind_memory=chosen.bind_numa_node,
        bind_threads=chosen.bind_threads,
        log_directory=None if elastic else chosen.log_dir,
        log_prefix=chosen.log_file_prefix or f"run_{time.strftime('%Y%m%d_%H%M%S')}",
        only=chosen.instance_idx,
    )
    made = plan.make_plan(machine, placements, settings)
    return distributed.hand_over(made, chosen) if elastic else made


def _run(made: plan.Plan, chosen: argparse.Namespace) -> int:
    instances = (distributed.as_instance(made),) if made.elastic else made.instances
    several = len(instances) > 1
    if chosen.log_dir is not None:
        try:
            chosen.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--log-dir: cannot make {chosen.log_dir}: {error.strerror}") from error
        say(f"output goes to {', '.join(str(instance.log or chosen.log_dir) for instance in instances)}")
    manner = process.Manner(
        stop_on_failure=chosen.on_failure == "stop",
        grace_seconds=chosen.grace_period,
        carried=several or chosen.benchmark,
        numbered=several,
        output=2 if chosen.json else 1,
        say=say,
    )
    result = process.run(instances, manner)
    if chosen.benchmark:
        if chosen.json:
            print(json.dumps(measure.as_data(result.measured), indent=2))
        else:
            measure.print_table(result.measured)
        sys.stdout.flush()
    return result.status
