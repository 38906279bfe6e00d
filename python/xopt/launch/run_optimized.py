"""What the launcher starts for `--auto-optimize`: runs a script or module as Python would, with its models watched."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

import torch

from xopt.launch.auto import Watch
from xopt.launch.options import DTYPES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m xopt.launch.run_optimized", allow_abbrev=False)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--leave", action="append", default=[])
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    dtype = None if chosen.dtype is None else getattr(torch, chosen.dtype)
    sys.argv = [chosen.program, *chosen.arguments]
    with Watch(dtype, chosen.leave, _say):
        if chosen.module:
            runpy.run_module(chosen.program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(chosen.program))
            runpy.run_path(chosen.program, run_name="__main__")


def _say(message: str) -> None:
    print(f"xopt-launch: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
