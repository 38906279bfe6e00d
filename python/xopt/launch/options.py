"""The options of `xopt-launch`: what can be said, and what of it goes together."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from xopt import machine
from xopt.launch import allocator, distributed, openmp
from xopt.launch.errors import LaunchError
from xopt.launch.placement import Request
from xopt.launch.plan import python_command

DTYPES = ("float32", "bfloat16", "float16")

_DESCRIPTION = """\
Starts one or more instances of a script, each on cores, memory and settings of its own, and sees them to their end.
What the instances get is derived from the cores that this process may use: affinity, cgroups, siblings, NUMA nodes."""

_EXAMPLES = """\
examples:
  xopt-launch script.py --its-arguments                   one instance on all cores
  xopt-launch --ninstances 4 script.py                    four, a quarter of the cores each
  xopt-launch --throughput-mode --benchmark script.py     one for each NUMA node, and what they come to together
  xopt-launch --cores-list 0-3,8-11 --ncores-per-instance 4 -m my.module
  xopt-launch --ninstances 2 --dry-run --explain script.py
                                                          shows what would be started, and why
  xopt-launch --auto-optimize --dtype bfloat16 script.py  an unchanged script, its models optimized
  xopt-launch --nproc-per-node 2 script.py                a torch.distributed script, two processes
  xopt-launch tune script.py                              finds the best settings (tune --help), for --config

An instance finds its number in XOPT_LAUNCH_INSTANCE, how many there are in XOPT_LAUNCH_INSTANCES, and its cores in
XOPT_LAUNCH_CPUS. It cannot read from the terminal."""


def build_parser(prog: str = "xopt-launch", examples: str = _EXAMPLES) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options] script.py arguments...",
        description=_DESCRIPTION,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("program", metavar="script.py", help="what to run; all that follows are its arguments")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # where nothing is given, argparse would name them as missing
    _add_program(parser.add_argument_group("what is run"))
    _add_instances(parser.add_argument_group("instances"))
    _add_cores(parser.add_argument_group("cores and memory"))
    _add_libraries(parser.add_argument_group("libraries"))
    _add_optimization(parser.add_argument_group("optimization"))
    _add_distribution(parser.add_argument_group("distributed runs, which are handed over to torchrun"))
    _add_course(parser.add_argument_group("course and output"))
    return parser


def _add_program(group: argparse._ArgumentGroup) -> None:
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument("-m", "--module", action="store_true", help="script.py is the name of a module")
    kinds.add_argument("--no-python", action="store_true", help="script.py is a program, to be run as it is")
    group.add_argument("--config", type=Path, metavar="FILE", help="options from a file that `xopt-launch tune` wrote")


def _add_instances(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ninstances", type=int, metavar="N", help="how many (one, if nothing else is said)")
    group.add_argument("--ncores-per-instance", type=int, metavar="N", help="cores of each")
    group.add_argument("--instance-idx", type=int, metavar="N", help="start number N of them alone")
    group.add_argument("--latency-mode", action="store_true", help="as many as there are four cores for")
    group.add_argument("--throughput-mode", action="store_true", help="one for each NUMA node, with all its cores")
    group.add_argument(
        "--oversubscribe",
        action="store_true",
        help="instances may share cores; their threads are not bound to one each",
    )


def _add_cores(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cores-list", type=_numbers, metavar="LIST", help="use these CPUs, as 0-3,8")
    group.add_argument("--nodes-list", type=_numbers, metavar="LIST", help="use the cores of these NUMA nodes")
    group.add_argument("--use-logical-cores", action="store_true", help="count each hardware thread as a core")
    group.add_argument("--use-e-cores", action="store_true", help="also use the E-cores of a hybrid CPU")
    group.add_argument(
        "--strategy",
        choices=("scatter", "close"),
        default="scatter",
        help="where instances go that do not need all cores: evenly to the nodes (default), or to one after the other",
    )
    group.add_argument(
        "--bind-numa-node",
        action="store_true",
        help="no instance spans NUMA nodes, and each takes memory from its own alone (otherwise: preferably)",
    )
    group.add_argument(
        "--no-bind-threads",
        dest="bind_threads",
        action="store_false",
        help="keep threads on their instance's cores, but not each on one: for scripts with data loading processes, "
        "which would all get the main thread's core",
    )


def _add_libraries(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--memory-allocator",
        choices=allocator.CHOICES,
        default="auto",
        help="auto (default): tcmalloc or jemalloc, if the system has one; default: the system's malloc",
    )
    group.add_argument(
        "--omp-runtime",
        choices=openmp.CHOICES,
        default="default",
        help="default: the OpenMP runtime that torch uses; intel: libiomp5, loaded ahead of it",
    )


def _add_optimization(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--auto-optimize",
        action="store_true",
        help="apply xopt.optimize to the script's models, each at its first forward in eval mode without gradients",
    )
    group.add_argument(
        "--dtype", choices=DTYPES, help="with --auto-optimize: the dtype to optimize to (default: as is)"
    )
    group.add_argument(
        "--leave-alone",
        action="append",
        default=[],
        metavar="CLASS",
        help="with --auto-optimize: not models of this class; also a pattern, as '*Encoder'; may be repeated",
    )


def _add_distribution(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="processes here, each with its share of the cores"
    )
    group.add_argument("--nnodes", metavar="N", help="machines, as a number or, elastic, as MIN:MAX (default: 1)")
    group.add_argument("--node-rank", type=int, metavar="N", help="which of them this is; with --master-addr")
    group.add_argument("--master-addr", metavar="HOST", help="the machine with rank 0")
    group.add_argument("--master-port", type=int, metavar="PORT", help="a port there")
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where the machines meet, instead of a master")


def _add_course(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dry-run", action="store_true", help="show what would be started, and start nothing")
    group.add_argument("--explain", action="store_true", help="say why it is as it is")
    group.add_argument("--json", action="store_true", help="with --dry-run or --benchmark: JSON instead of tables")
    group.add_argument(
        "--on-failure",
        choices=("stop", "continue"),
        default="stop",
        help="when an instance fails: stop the others (default), or let them run; its exit status is the launcher's",
    )
    group.add_argument(
        "--grace-period",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="from the signal that stops instances until they are killed (default: 10)",
    )
    group.add_argument("--log-dir", type=Path, metavar="DIR", help="a file for each instance's output, in DIR")
    group.add_argument(
        "--log-file-prefix", metavar="NAME", help="how the names of these files begin (default: run_TIME)"
    )
    group.add_argument(
        "--benchmark",
        action="store_true",
        help="sum up at the end: times, CPUs used, peak memory, and what scripts told by xopt.launch.report",
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = machine.parse_list(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not numbers:
        raise argparse.ArgumentTypeError("expected numbers and ranges like 0-3,8, got none")
    return numbers


def check(chosen: argparse.Namespace) -> None:
    """What the parser does not see."""
    if chosen.json and not (chosen.dry_run or chosen.benchmark):
        raise LaunchError("--json: there is nothing to be shown as JSON without --dry-run or --benchmark")
    if chosen.log_file_prefix is not None and chosen.log_dir is None:
        raise LaunchError("--log-file-prefix: needs --log-dir")
    if chosen.log_file_prefix is not None and "/" in chosen.log_file_prefix:
        raise LaunchError(f"--log-file-prefix: expected a name without /, got {chosen.log_file_prefix!r}")
    if (chosen.dtype is not None or chosen.leave_alone) and not chosen.auto_optimize:
        raise LaunchError("--dtype and --leave-alone: need --auto-optimize")
    if chosen.auto_optimize and chosen.no_python:
        raise LaunchError("--auto-optimize and --no-python: only models of a Python script can be optimized")
    distributed.check(chosen)
    if not chosen.grace_period >= 0:
        raise LaunchError(f"--grace-period: expected 0 or more seconds, got {chosen.grace_period}")


def request(chosen: argparse.Namespace) -> Request:
    asked = Request(**{name: getattr(chosen, name) for name in Request.__dataclass_fields__})
    ranks = distributed.local_ranks(chosen)
    return asked if ranks is None else replace(asked, ninstances=ranks)


def command(chosen: argparse.Namespace) -> tuple[str, ...]:
    kind = "module" if chosen.module else "program" if chosen.no_python else "script"
    if kind == "script" and not Path(chosen.program).is_file():
        raise LaunchError(f"there is no script {chosen.program} (-m for a module, --no-python for a program)")
    if chosen.auto_optimize:
        return _optimizing_command(chosen)
    return python_command(chosen.program, chosen.arguments, kind, sys.executable)


def _optimizing_command(chosen: argparse.Namespace) -> tuple[str, ...]:
    own = [f"--leave={pattern}" for pattern in chosen.leave_alone]
    if chosen.dtype is not None:
        own.append(f"--dtype={chosen.dtype}")
    if chosen.module:
        own.append("-m")
    return python_command(
        "xopt.launch.run_optimized", [*own, chosen.program, *chosen.arguments], "module", sys.executable
    )
