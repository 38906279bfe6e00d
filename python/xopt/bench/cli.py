"""The command line of the bench. Every module of this package that has `add_arguments` and `run` is a subcommand.

A subcommand is named after its module, described by the first line of the module's docstring, and tells what the user
did wrong by raising `BenchError`.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

import xopt.bench
from xopt.bench.errors import BenchError


def find_commands() -> dict[str, ModuleType]:
    commands = {}
    for info in pkgutil.iter_modules(xopt.bench.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"xopt.bench.{info.name}")
        if hasattr(module, "add_arguments") and hasattr(module, "run"):
            commands[info.name] = module
    return commands


def build_parser(commands: dict[str, ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m xopt.bench", description="Measures xopt on this machine.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="|".join(sorted(commands)))
    for name, module in sorted(commands.items()):
        description = (module.__doc__ or name).strip()
        subparser = subparsers.add_parser(
            name,
            help=description.splitlines()[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    commands = find_commands()
    options = build_parser(commands).parse_args(arguments)
    try:
        commands[options.command].run(options)
    except BenchError as error:
        print(f"xopt.bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("xopt.bench: interrupted", file=sys.stderr)
        return 130
    return 0
