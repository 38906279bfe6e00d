"""From the options to the plan: reads the machine, finds the libraries, places the instances."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from xopt.launch import allocator, distributed, libraries, openmp, options, placement, plan, topology

_PACKAGE = Path(__file__).parent.parent


def build_plan(chosen: argparse.Namespace) -> plan.Plan:
    machine = topology.read_own()
    placements = placement.place(machine, options.request(chosen))
    places = libraries.directories(os.environ)
    elastic = distributed.is_wanted(chosen)
    settings = plan.Settings(
        command=options.command(chosen),
        allocator=allocator.choose(chosen.memory_allocator, os.environ, (*places, _PACKAGE)),
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
