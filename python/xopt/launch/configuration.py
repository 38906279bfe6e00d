"""Files of options: what `xopt-launch tune` writes and `--config` takes.

A file holds an object "options" with the options' names, as on the command line but without dashes in front, and their
values. The command line wins. Whatever else is in the file is for its readers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xopt.launch.errors import LaunchError

# What can stand in a file, and what it must be there. A flag that switches something off has the name of that.
KINDS: dict[str, type] = {
    "ninstances": int,
    "ncores-per-instance": int,
    "use-logical-cores": bool,
    "use-e-cores": bool,
    "bind-numa-node": bool,
    "bind-threads": bool,
    "strategy": str,
    "memory-allocator": str,
    "omp-runtime": str,
}


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    chosen = parser.parse_args(arguments)
    if chosen.config is None:
        return chosen
    parser.set_defaults(**{name.replace("-", "_"): value for name, value in read(chosen.config, parser).items()})
    return parser.parse_args(arguments)


def read(path: Path, parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise LaunchError(f"--config: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise LaunchError(f"--config: {path} is no JSON: {error}") from error
    options = found.get("options") if isinstance(found, dict) else None
    if not isinstance(options, dict):
        raise LaunchError(f'--config: {path}: expected an object with an object "options" in it')
    choices = {action.dest: action.choices for action in parser._actions if action.choices is not None}
    for name, value in options.items():
        if name not in KINDS:
            raise LaunchError(f"--config: {path}: unknown option {name!r}; known are {', '.join(KINDS)}")
        if type(value) is not KINDS[name]:
            raise LaunchError(f"--config: {path}: {name}: expected {KINDS[name].__name__}, got {json.dumps(value)}")
        allowed = choices.get(name.replace("-", "_"))
        if allowed is not None and value not in allowed:
            raise LaunchError(f"--config: {path}: {name}: expected one of {', '.join(allowed)}, got {value!r}")
    return options
