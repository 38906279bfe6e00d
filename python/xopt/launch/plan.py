"""What will be started: the placements, with memory policy, libraries, environment and command line of each instance.

Pure, but for the files that libraries are looked for in: `--dry-run` shows it, `process` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xopt.launch import openmp
from xopt.launch.allocator import Allocator
from xopt.launch.errors import LaunchError
from xopt.launch.openmp import OpenMP
from xopt.launch.placement import Placement, Placements
from xopt.launch.topology import Topology
from xopt.machine import format_list

# Variables by which other OpenMP settings of the user say where threads go: then none of ours does.
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")


@dataclass(frozen=True)
class MemoryPolicy:
    mode: str
    """"local": from the node that asks; "prefer": from these nodes while they have some; "bind": from no others."""
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Instance:
    index: int
    cpus: tuple[int, ...]
    threads: int
    nodes: tuple[int, ...]
    memory: MemoryPolicy
    allocator: str
    environment: Mapping[str, str]
    """What is set on top of the launcher's own."""
    command: tuple[str, ...]
    log: Path | None = None


@dataclass(frozen=True)
class Plan:
    instances: tuple[Instance, ...]
    reasons: tuple[str, ...]
    """Why it is as it is."""
    warnings: tuple[str, ...] = field(default=())
    """Where the user's own environment keeps a setting from being made."""
    elastic: tuple[str, ...] = ()
    """The command of torch's elastic launcher, where it is that which starts the instances, as its local ranks."""

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "instances": [
                {
                    **asdict(instance),
                    "cpus": format_list(instance.cpus),
                    "log": None if instance.log is None else str(instance.log),
                }
                for instance in self.instances
            ],
            "elastic": list(self.elastic),
            "reasons": list(self.reasons),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Settings:
    """What all instances have in common."""

    command: tuple[str, ...]
    allocator: Allocator
    runtime: OpenMP
    environment: Mapping[str, str]
    """The user's own."""
    bind_memory: bool = False
    bind_threads: bool = True
    log_directory: Path | None = None
    log_prefix: str = "run"
    only: int | None = None
    """Start this instance alone."""


def make_plan(topology: Topology, placements: Placements, settings: Settings) -> Plan:
    reasons = [*placements.reasons, settings.allocator.reason, settings.runtime.reason]
    warnings: dict[str, None] = {}
    instances = [
        _instance(index, placement, len(placements.instances), topology, settings, reasons, warnings)
        for index, placement in enumerate(placements.instances)
    ]
    if settings.only is not None:
        last = len(instances) - 1
        if not 0 <= settings.only <= last:
            raise LaunchError(f"--instance-idx: expected 0 to {last}, the last instance, got {settings.only}")
        reasons.append(f"Of {len(instances)} instances, number {settings.only} alone is started (--instance-idx).")
        instances = [instances[settings.only]]
    return Plan(tuple(instances), tuple(dict.fromkeys(reasons)), tuple(warnings))


def _instance(
    index: int,
    placement: Placement,
    number: int,
    topology: Topology,
    settings: Settings,
    reasons: list[str],
    warnings: dict[str, None],
) -> Instance:
    environment = _variables(placement, topology, settings, reasons)
    environment |= {
        "XOPT_LAUNCH_INSTANCE": str(index),
        "XOPT_LAUNCH_INSTANCES": str(number),
        # Once an OpenMP runtime has bound the main thread, its own affinity does not tell any more.
        "XOPT_LAUNCH_CPUS": format_list(placement.cpus),
    }
    log = settings.log_directory
    return Instance(
        index=index,
        cpus=placement.cpus,
        threads=placement.threads,
        nodes=placement.nodes,
        memory=_memory_policy(placement, topology, settings.bind_memory, reasons),
        allocator=settings.allocator.name,
        environment=_yielding(environment, settings.environment, warnings),
        command=settings.command,
        log=None if log is None else log / f"{settings.log_prefix}_instance_{index}.log",
    )


def _memory_policy(placement: Placement, topology: Topology, bind: bool, reasons: list[str]) -> MemoryPolicy:
    found = {node: topology.memory_node_of(node) for node in placement.nodes}
    near = tuple(sorted({memory for memory in found.values() if memory is not None}))
    for node, memory in found.items():
        if memory not in (node, None):
            reasons.append(f"Node {node} has no memory for this process; the nearest that has is node {memory}.")
    if bind and near:
        return MemoryPolicy("bind", near)
    if len(near) == 1 and len(topology.nodes) > 1:
        return MemoryPolicy("prefer", near)
    return MemoryPolicy("local")


def _variables(placement: Placement, topology: Topology, settings: Settings, reasons: list[str]) -> dict[str, str]:
    own = [name for name in _BINDING if name in settings.environment]
    fixed = placement.fixed and settings.bind_threads and not own
    crowded = topology.quota is not None and topology.quota < len(placement.cpus)
    environment = openmp.variables(settings.runtime, placement.cpus, placement.threads, fixed, crowded)
    if own:
        reasons.append(f"Threads are bound as {own[0]} of the environment says, if at all.")
    elif not settings.bind_threads:
        reasons.append("Threads are bound to the instance's cores, not to one each (--no-bind-threads).")
    environment |= settings.allocator.environment
    libraries = [str(library) for library in (settings.allocator.library, settings.runtime.library) if library]
    if libraries:
        environment["LD_PRELOAD"] = ":".join(libraries)
    return environment


def _yielding(wanted: Mapping[str, str], own: Mapping[str, str], warnings: dict[str, None]) -> dict[str, str]:
    """What of the wanted variables is to be set, where the user's own win."""
    result = {}
    for name, value in wanted.items():
        if name.startswith("XOPT_LAUNCH_"):
            result[name] = value
        elif name == "LD_PRELOAD" and own.get(name):
            result[name] = f"{own[name]}:{value}"
        elif name not in own:
            result[name] = value
        elif own[name] != value:
            warnings[f"{name}={own[name]} is set in the environment and kept; it would have been {value}"] = None
    return result


def python_command(program: str, arguments: Sequence[str], kind: str, python: str) -> tuple[str, ...]:
    """`kind`: "script", "module", or "program", which is run as it is."""
    if kind == "program":
        return (program, *arguments)
    # Unbuffered: what an instance has said is seen at once, and is not lost when it is killed.
    return (python, "-u", *(("-m", program) if kind == "module" else (program,)), *arguments)
