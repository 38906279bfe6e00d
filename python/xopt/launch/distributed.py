"""Distributed runs: torch's own elastic launcher starts them, and each local rank binds itself before it begins.

Rendezvous, restarts and the ranks' variables are torchrun's, unchanged. It is told to start `local_rank`, which takes
its share of the plan from the environment, and then becomes the script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import asdict, replace

from xopt.launch.errors import LaunchError
from xopt.launch.plan import Instance, MemoryPolicy, Plan

RANKS = "XOPT_LAUNCH_RANKS"

_OPTIONS = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint")
BECOME_RANK = "--become-local-rank"
"""What torchrun starts xopt_launch with. Entered like this, a rank imports no torch only to become another process."""


def is_wanted(chosen: argparse.Namespace) -> bool:
    return any(getattr(chosen, name) is not None for name in _OPTIONS)


def local_ranks(chosen: argparse.Namespace) -> int | None:
    """How many, if it is a distributed run whose mode does not say it."""
    if not is_wanted(chosen) or chosen.latency_mode or chosen.throughput_mode:
        return None
    return chosen.nproc_per_node or 1


def check(chosen: argparse.Namespace) -> None:
    if not is_wanted(chosen):
        return
    for name in ("ninstances", "instance_idx", "log_file_prefix"):
        if getattr(chosen, name) is not None:
            raise LaunchError(
                f"--{name.replace('_', '-')}: not in a distributed run; its instances are the local ranks"
            )
    if chosen.benchmark:
        raise LaunchError("--benchmark: not in a distributed run; its ranks know their common throughput themselves")
    if chosen.nproc_per_node is not None:
        if chosen.nproc_per_node < 1:
            raise LaunchError(f"--nproc-per-node: expected 1 or more, got {chosen.nproc_per_node}")
        if chosen.latency_mode or chosen.throughput_mode:
            raise LaunchError("--nproc-per-node and a mode: the mode sets the number by itself; leave one of them out")
    if not re.fullmatch(r"\d+(:\d+)?", chosen.nnodes or "1"):
        raise LaunchError(f"--nnodes: expected a number or MIN:MAX, got {chosen.nnodes!r}")
    if chosen.rdzv_endpoint and (chosen.master_addr or chosen.master_port or chosen.node_rank is not None):
        raise LaunchError("--rdzv-endpoint and --master-addr, --master-port or --node-rank: it is one or the other")
    if (chosen.nnodes or "1") != "1" and not chosen.rdzv_endpoint:
        missing = [name for name in ("master_addr", "node_rank") if getattr(chosen, name) is None]
        if missing:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise LaunchError(f"--nnodes {chosen.nnodes}: needs {names}, or --rdzv-endpoint")


def hand_over(plan: Plan, chosen: argparse.Namespace) -> Plan:
    """The same instances, to be started as local ranks."""
    command = [sys.executable, "-u", "-m", "torch.distributed.run", f"--nproc-per-node={len(plan.instances)}"]
    if chosen.rdzv_endpoint:
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={chosen.rdzv_endpoint}"]
    elif chosen.master_addr is None and chosen.master_port is None:
        command.append("--standalone")
    for name in ("nnodes", "node_rank", "master_addr", "master_port", "log_dir"):
        if getattr(chosen, name) is not None:
            command.append(f"--{name.replace('_', '-')}={getattr(chosen, name)}")
    if chosen.log_dir is not None:
        command.append("--redirects=3")
    return replace(plan, elastic=(*command, "-m", "xopt_launch", BECOME_RANK, *plan.instances[0].command))


def as_instance(plan: Plan) -> Instance:
    """What the launcher itself starts: torchrun, which waits. Its ranks bind themselves, and tell what is denied."""
    nodes = tuple(sorted({node for instance in plan.instances for node in instance.nodes}))
    threads = {name: value for name, value in plan.instances[0].environment.items() if name == "OMP_NUM_THREADS"}
    ranks = [
        {"cpus": rank.cpus, "memory": asdict(rank.memory), "environment": dict(rank.environment)}
        for rank in plan.instances
    ]
    return Instance(
        index=0,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        threads=1,
        nodes=nodes,
        memory=MemoryPolicy("local"),
        allocator="default",
        # torchrun would set a number of threads itself, and say so at length; the ranks have theirs from the plan.
        environment={**threads, RANKS: json.dumps(ranks)},
        command=plan.elastic,
    )
