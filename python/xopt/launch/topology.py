"""The cores that this process may use, as Linux tells: siblings, sockets, NUMA nodes, kinds of cores, limits.

Every file is read below `root`, so that tests can show it other machines. CPU is the kernel's word for a hardware
thread; a core has one or more of them, its siblings. Nothing is derived from how CPUs are numbered: machines number
siblings side by side (0 and 1) or half a machine apart (0 and 56), and virtual machines do either.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from xopt import machine


@dataclass(frozen=True)
class Core:
    cpus: tuple[int, ...]
    """Its hardware threads that may be used."""
    siblings: tuple[int, ...]
    """All its hardware threads that are online."""
    node: int
    socket: int
    efficient: bool
    """An E-core of a hybrid CPU."""


@dataclass(frozen=True)
class Node:
    number: int
    memory_bytes: int
    usable: bool
    """Whether this process may take memory from it."""
    distances: tuple[int, ...]
    """To each node that is online, in order."""


@dataclass(frozen=True)
class Topology:
    cores: tuple[Core, ...]
    """Those with a CPU that may be used, by node and first CPU."""
    nodes: tuple[Node, ...]
    offline: tuple[int, ...]
    forbidden: tuple[int, ...]
    """CPUs that are online, but that the affinity or the cgroup keep from this process."""
    quota: float | None
    """CPUs' worth of time that the cgroup grants; None: no limit."""
    virtual: bool
    """A virtual machine: what it tells of siblings and sockets may not be what the hardware is."""

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def hybrid(self) -> bool:
        return len({core.efficient for core in self.cores}) == 2

    def memory_node_of(self, node: int) -> int | None:
        """The nearest node that has memory for this process: mostly the node itself."""
        able = [other.number for other in self.nodes if other.usable and other.memory_bytes > 0]
        own = next((other for other in self.nodes if other.number == node), None)
        if own is None or not able:
            return None
        distances = dict(zip((other.number for other in self.nodes), own.distances, strict=False))
        return min(able, key=lambda number: (number != node, distances.get(number, 255), number))


def read(root: Path = machine.ROOT, affinity: Collection[int] | None = None) -> Topology:
    """The machine below `root`. `affinity`: the CPUs this process may run on; None: as /proc/self/status has it."""
    cpu_directory = root / "sys/devices/system/cpu"
    allowed = set(_affinity(root) if affinity is None else affinity)
    online = set(machine.list_in(cpu_directory / "online") or allowed)
    cpuset = machine.cgroup_cpuset(root)
    within_cpuset = set(machine.parse_list(cpuset.cpus)) if cpuset.cpus else online
    usable = online & allowed & within_cpuset
    nodes, node_of = _nodes(root, online, cpuset.nodes)
    efficient = set(machine.list_in(root / "sys/devices/cpu_atom/cpus"))
    cores = {}
    for cpu in sorted(usable):
        siblings = _siblings(cpu_directory, cpu, online)
        cores[siblings[0]] = Core(
            cpus=tuple(sibling for sibling in siblings if sibling in usable),
            siblings=siblings,
            node=node_of.get(cpu, nodes[0].number),
            socket=max(_number_in(cpu_directory / f"cpu{cpu}/topology/physical_package_id", 0), 0),
            efficient=cpu in efficient,
        )
    return Topology(
        cores=tuple(sorted(cores.values(), key=lambda core: (core.node, core.cpus))),
        nodes=nodes,
        offline=machine.list_in(cpu_directory / "offline"),
        forbidden=tuple(sorted(online - usable)),
        quota=machine.cgroup_limits(root).cpus,
        virtual=" hypervisor" in (machine.read_text(root / "proc/cpuinfo") or ""),
    )


def read_own() -> Topology:
    """This machine, and what of it this process may use."""
    return read(affinity=os.sched_getaffinity(0))


def _affinity(root: Path) -> tuple[int, ...]:
    return machine.parse_list(_status_field(root, "Cpus_allowed_list") or "0")


def _status_field(root: Path, name: str) -> str | None:
    found = re.search(rf"^{name}:\s*(\S+)$", machine.read_text(root / "proc/self/status") or "", re.MULTILINE)
    return found[1] if found else None


def _siblings(cpu_directory: Path, cpu: int, online: set[int]) -> tuple[int, ...]:
    topology = cpu_directory / f"cpu{cpu}/topology"
    listed = machine.list_in(topology / "core_cpus_list") or machine.list_in(topology / "thread_siblings_list")
    return tuple(sorted((set(listed) & online) | {cpu}))


def _nodes(root: Path, online: set[int], cpuset_nodes: str | None) -> tuple[tuple[Node, ...], dict[int, int]]:
    """The nodes, and the node of each CPU. A kernel without NUMA shows none: then there is one, with everything."""
    found = machine.numa_nodes(root)
    if not found:
        memory = re.search(r"MemTotal:\s+(\d+) kB", machine.read_text(root / "proc/meminfo") or "")
        size = int(memory[1]) * 1024 if memory else 1
        return (Node(0, size, usable=True, distances=(10,)),), dict.fromkeys(online, 0)
    usable = {node.node for node in found}
    for text in (_status_field(root, "Mems_allowed_list"), cpuset_nodes):
        if text:
            usable &= set(machine.parse_list(text))
    nodes = tuple(
        Node(
            number=node.node,
            memory_bytes=node.memory_bytes,
            usable=node.node in usable,
            distances=_distances(root / f"sys/devices/system/node/node{node.node}/distance"),
        )
        for node in found
    )
    return nodes, {cpu: node.node for node in found for cpu in machine.parse_list(node.cpus)}


def _distances(path: Path) -> tuple[int, ...]:
    return tuple(int(field) for field in (machine.read_text(path) or "").split())


def _number_in(path: Path, default: int) -> int:
    text = machine.read_text(path) or ""
    return int(text) if re.fullmatch(r"-?\d+", text) else default
