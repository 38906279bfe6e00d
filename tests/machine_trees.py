"""Trees of files as Linux shows them on other machines: synthetic ones, made here, and recorded ones in machines/.

A recorded tree is a JSON object: a file's path below / and its text.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from xopt.launch.topology import Topology, read
from xopt.machine import format_list

RECORDED = pathlib.Path(__file__).parent / "machines"
GIGABYTE = 1 << 30


@dataclass
class Machine:
    """Sockets of nodes of cores of threads. Cores are numbered through in this order."""

    sockets: int = 1
    nodes_per_socket: int = 1
    cores_per_node: int = 4
    threads: int = 2
    adjacent_siblings: bool = False
    """Siblings are numbered 0 and 1, as many virtual machines do, instead of half a machine apart."""
    shows_siblings: bool = True
    e_cores: int = 0
    """Cores without siblings, numbered behind all others, in the last node."""
    offline: Sequence[int] = ()
    affinity: str | None = None
    memory: dict[int, int] = field(default_factory=dict)
    """Gigabytes of the nodes that have not 64."""
    mems_allowed: str | None = None
    extra_memory_nodes: int = 0
    """Nodes without CPUs (CXL, HBM)."""
    virtual: bool = False
    numa: bool = True
    files: dict[str, str] = field(default_factory=dict)
    """Whatever else there is: cgroups."""

    def tree(self) -> dict[str, str]:
        files = dict(self.files)
        cores = self._cores()
        everything = sorted(cpu for _, _, cpus in cores for cpu in cpus)
        online = [cpu for cpu in everything if cpu not in self.offline]
        cpu_directory = "sys/devices/system/cpu"
        files[f"{cpu_directory}/online"] = format_list(online)
        files[f"{cpu_directory}/offline"] = format_list(sorted(self.offline))
        for number, (socket, _, cpus) in enumerate(cores):
            for cpu in (cpu for cpu in cpus if cpu not in self.offline):
                siblings = [other for other in cpus if other in online] if self.shows_siblings else [cpu]
                topology = f"{cpu_directory}/cpu{cpu}/topology"
                files[f"{topology}/thread_siblings_list"] = format_list(siblings)
                files[f"{topology}/core_id"] = str(number)
                files[f"{topology}/physical_package_id"] = str(socket)
        if self.e_cores:
            files["sys/devices/cpu_core/cpus"] = format_list(everything[: -self.e_cores])
            files["sys/devices/cpu_atom/cpus"] = format_list(everything[-self.e_cores :])
        nodes = self.sockets * self.nodes_per_socket + self.extra_memory_nodes
        if self.numa:
            files |= self._node_files(cores, online, nodes)
        files["proc/meminfo"] = "MemTotal:       67108864 kB\n"
        allowed, mems = self.affinity or format_list(online), self.mems_allowed or f"0-{nodes - 1}"
        files["proc/self/status"] = f"Name:\tpython\nCpus_allowed_list:\t{allowed}\nMems_allowed_list:\t{mems}\n"
        files["proc/cpuinfo"] = f"flags\t\t: fpu avx512f{' hypervisor' if self.virtual else ''}\n"
        return files

    def _cores(self) -> list[tuple[int, int, list[int]]]:
        """Socket, node and CPUs of each core."""
        total = self.sockets * self.nodes_per_socket * self.cores_per_node
        cores = []
        for number in range(total):
            node = number // self.cores_per_node
            first, step = (number * self.threads, 1) if self.adjacent_siblings else (number, total)
            cores.append((node // self.nodes_per_socket, node, [first + step * index for index in range(self.threads)]))
        last = self.sockets * self.nodes_per_socket - 1
        cores += [(self.sockets - 1, last, [total * self.threads + number]) for number in range(self.e_cores)]
        return cores

    def _node_files(self, cores: list[tuple[int, int, list[int]]], online: list[int], nodes: int) -> dict[str, str]:
        files = {}
        for node in range(nodes):
            directory = f"sys/devices/system/node/node{node}"
            of_node = sorted(cpu for _, its, cpus in cores if its == node for cpu in cpus if cpu in online)
            size = self.memory.get(node, 64) * GIGABYTE // 1024
            files[f"{directory}/cpulist"] = format_list(of_node)
            files[f"{directory}/meminfo"] = f"Node {node} MemTotal:       {size} kB\n"
            same = [other // self.nodes_per_socket == node // self.nodes_per_socket for other in range(nodes)]
            files[f"{directory}/distance"] = " ".join(
                "10" if other == node else "12" if same[other] else "21" for other in range(nodes)
            )
        return files


def write(files: dict[str, str], root: pathlib.Path) -> pathlib.Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n" if not text.endswith("\n") else text)
    return root


def topology_of(machine: Machine, root: pathlib.Path) -> Topology:
    return read(write(machine.tree(), root))


def recorded(name: str, root: pathlib.Path) -> Topology:
    return read(write(json.loads((RECORDED / f"{name}.json").read_text()), root))


def cgroup_v2(path: str = "/", **settings: str) -> dict[str, str]:
    """A version 2 hierarchy; settings are named as files, with _ for a dot: cpu_max="150000 100000"."""
    directory = f"sys/fs/cgroup{path}".rstrip("/")
    return {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        **{f"{directory}/{name.replace('_', '.')}": value for name, value in settings.items()},
    }


def cgroup_v1(path: str, cpuset: dict[str, str], cpu: dict[str, str]) -> dict[str, str]:
    """Version 1 hierarchies of cpuset and cpu, of which a container sees its own group as the topmost."""
    mounts = [("cpuset", "cpuset"), ("cpu,cpuacct", "cpu,cpuacct")]
    return {
        "proc/self/cgroup": "".join(f"{index}:{name}:{path}\n" for index, (name, _) in enumerate(mounts)),
        "proc/self/mountinfo": "".join(
            f"{40 + index} 23 0:{50 + index} {path} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{options}\n"
            for index, (name, options) in enumerate(mounts)
        ),
        **{f"sys/fs/cgroup/cpuset/cpuset.{name}": value for name, value in cpuset.items()},
        **{f"sys/fs/cgroup/cpu,cpuacct/cpu.{name}": value for name, value in cpu.items()},
    }


def spr_snc4() -> Machine:
    """Two sockets of 56 cores, each in four sub-NUMA clusters."""
    return Machine(sockets=2, nodes_per_socket=4, cores_per_node=14)


def emr() -> Machine:
    return Machine(cores_per_node=64)


def masked_cloud_vm() -> Machine:
    return Machine(cores_per_node=1, threads=2, adjacent_siblings=True, shows_siblings=False, virtual=True)


def hybrid_desktop() -> Machine:
    """8 P-cores with two threads each (0-15, siblings side by side), 8 E-cores (16-23)."""
    return Machine(cores_per_node=8, adjacent_siblings=True, e_cores=8)


def epyc_8_nodes() -> Machine:
    return Machine(sockets=2, nodes_per_socket=4, cores_per_node=16)


def small_container() -> Machine:
    """Four CPUs of a large machine by a cpuset, and time for one and a half."""
    files = cgroup_v2(cpuset_cpus_effective="8-11", cpuset_mems_effective="0", cpu_max="150000 100000")
    return Machine(cores_per_node=32, affinity="8-11", files=files)
