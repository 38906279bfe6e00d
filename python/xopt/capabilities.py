"""What this machine and this build can do, as plain data."""

import os
from dataclasses import dataclass

import torch

from xopt import _C, machine


@dataclass(frozen=True)
class KernelInfo:
    name: str
    dtype: str
    isa: str
    calls: int
    """How often it was run in this process."""
    chosen: bool
    """Whether a call now would take it: the highest of its name and dtype up to the active level."""


@dataclass(frozen=True)
class Caches:
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int


@dataclass(frozen=True)
class Capabilities:
    cpu: str
    levels: tuple[str, ...]
    """The levels that this process may use, lowest first."""
    level: str
    """The level that kernels are chosen by: the highest of `levels`, unless XOPT_MAX_ISA caps it."""
    features: dict[str, bool]
    emulated: bool
    """A build for tests, in which plain C++ stands for AMX and AVX512-BF16."""
    caches: Caches
    """Of a core; 0: unknown."""
    xopt_version: str
    torch_version: str
    threads: int
    affinity: tuple[int, ...]
    """The CPUs that this process may run on."""
    openmp: tuple[str, ...]
    """Paths of the OpenMP runtimes in this process."""
    numa_nodes: tuple[machine.NumaNode, ...]
    allocator: str
    huge_pages: str
    cgroup: machine.CgroupLimits

    @property
    def present_features(self) -> tuple[str, ...]:
        """In alphabetical order."""
        return tuple(sorted(name for name, present in self.features.items() if present))


def capabilities() -> Capabilities:
    """What this machine and this build can do, at present."""
    features = _C.cpu_features()
    known = _C.isa_levels()
    return Capabilities(
        cpu=_C.cpu_brand(),
        levels=known[: known.index(_C.detected_isa()) + 1],
        level=_C.active_isa(),
        features={name: present for name, present in features.items() if name != "emulated"},
        emulated=features["emulated"],
        caches=Caches(*_C.cache_bytes()),
        xopt_version=_C.__version__,
        torch_version=torch.__version__,
        threads=_C.max_threads(),
        affinity=tuple(sorted(os.sched_getaffinity(0))),
        openmp=machine.openmp_runtimes(),
        numa_nodes=machine.numa_nodes(),
        allocator=machine.allocator(),
        huge_pages=machine.huge_pages(),
        cgroup=machine.cgroup_limits(),
    )


def kernels() -> tuple[KernelInfo, ...]:
    """Every kernel of this build, by name, dtype and level."""
    order = _C.isa_levels().index
    records = sorted(_C.kernels(), key=lambda record: (record["name"], record["dtype"], order(record["isa"])))
    return tuple(KernelInfo(**record) for record in records)
