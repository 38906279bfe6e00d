"""The command line of `xopt-launch`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from xopt.launch import configuration, distributed, local_rank, measure, options, output, plan, process, show, tune
from xopt.launch.build import build_plan
from xopt.launch.errors import LaunchError
from xopt.launch.output import say

_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    output.open_missing_standard_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == [distributed.BECOME_RANK]:
        local_rank.become(arguments[1:])
    try:
        if arguments[:1] == ["tune"]:
            return tune.main(arguments[1:])
        chosen = configuration.parse(options.build_parser(), arguments)
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
        measure.read_logs(result.measured, instances)
        if chosen.json:
            print(json.dumps(measure.as_data(result.measured), indent=2))
        else:
            measure.print_table(result.measured)
        sys.stdout.flush()
    return result.status
