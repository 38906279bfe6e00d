"""`xopt-profile script.py its arguments` runs an unchanged script under the profiler; `--diff` compares profiles."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from xopt.profiling.result import Profile
from xopt.profiling.roof_cache import roofs_of_machine
from xopt.profiling.session import profiler


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: the script's own, or 2 where the command line is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.diff:
        return _print_difference(*options.diff)
    if options.program is None:
        parser.error("a script is needed, or --diff")
    if not options.module and not Path(options.program).is_file():
        parser.error(f"script: there is no file {options.program}")
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xopt-profile", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the profile, for --diff and for replay")
    parser.add_argument("--html", type=Path, metavar="FILE", help="writes a report for a browser")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="writes the timeline for Perfetto")
    parser.add_argument("--no-roofs", action="store_true", help="without comparison with the machine's limits")
    parser.add_argument("--remeasure", action="store_true", help="measures the machine's limits anew")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compares two profiles")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as with python -m")
    parser.add_argument("program", nargs="?", metavar="script.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _run(options: argparse.Namespace) -> int:
    status = 0
    if options.remeasure:
        roofs_of_machine(torch.get_num_threads(), remeasure=True)
    session = profiler(roofs=not options.no_roofs)
    sys.argv = [options.program, *options.arguments]
    with session as taken:
        try:
            if options.module:
                runpy.run_module(options.program, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = os.path.dirname(os.path.abspath(options.program))
                runpy.run_path(options.program, run_name="__main__")
        except SystemExit as end:
            status = _status_of(end)
            if status:
                taken.error = f"SystemExit: {end.code}"
        except KeyboardInterrupt:
            taken.error, status = "KeyboardInterrupt", 130
        except BaseException as error:  # as Python would: the script's error, and the status that says so
            traceback.print_exc()
            taken.error, status = f"{type(error).__name__}: {error}", 1
    taken.title = Path(options.program).name
    _write(taken, options)
    return status


def _status_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1


def _write(taken: Profile, options: argparse.Namespace) -> None:
    print(taken)
    if options.json is not None:
        options.json.write_text(taken.to_json())
    if options.html is not None:
        taken.to_html(options.html)
    if options.trace is not None:
        taken.trace(options.trace)


def _print_difference(before: Path, after: Path) -> int:
    from xopt.profiling.difference import text_of_difference

    try:
        first, second = (Profile.from_json(path.read_text()) for path in (before, after))
    except (OSError, ValueError) as error:
        print(f"xopt-profile: --diff: {error}", file=sys.stderr)
        return 2
    print(text_of_difference(first, second))
    return 0
