"""What Linux tells about this process and the machine it is on: libraries, memory, CPUs, limits.

What reads files does so below `root`, so that tests can show it other machines.
"""

import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path("/")

_Number = TypeVar("_Number", int, float)

_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")
_ALLOCATORS = ("xopt_pool", "tcmalloc", "jemalloc", "mimalloc")
# A cgroup v1 without a memory limit shows the largest multiple of the page size that fits in 63 bits.
_V1_NO_MEMORY_LIMIT = 1 << 60


@dataclass(frozen=True)
class NumaNode:
    node: int
    cpus: str
    memory_bytes: int


@dataclass(frozen=True)
class CgroupLimits:
    version: int
    """1 or 2; 0 where there are no control groups."""
    cpus: float | None
    """CPUs' worth of time; None: no limit."""
    memory_bytes: int | None


@dataclass(frozen=True)
class Cpuset:
    """What a cgroup lets its processes use, as the kernel writes lists: "0-3,8". None: it does not say."""

    cpus: str | None
    nodes: str | None


def read_text(path: Path) -> str | None:
    """The file's text without surrounding blanks, or None where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def mapped_libraries(root: Path = ROOT) -> tuple[str, ...]:
    """Paths of the files that are mapped into this process, in order of address, each once."""
    paths: dict[str, None] = {}
    for line in (read_text(root / "proc/self/maps") or "").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            paths[fields[5]] = None
    return tuple(paths)


def openmp_runtimes(root: Path = ROOT) -> tuple[str, ...]:
    """Paths of the OpenMP runtimes in this process: one, unless somebody has brought a second."""
    return tuple(path for path in mapped_libraries(root) if _OPENMP.search(path))


def give_back_freed_memory(keep_bytes: int = 0) -> None:
    """Has glibc's malloc return to the system what was freed, which it otherwise keeps for allocations to come."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(keep_bytes))


def allocator(root: Path = ROOT) -> str:
    names = [Path(path).name for path in mapped_libraries(root)]
    for known in _ALLOCATORS:
        if any(name.startswith(f"lib{known}") for name in names):
            return known
    return "glibc"


def huge_pages(root: Path = ROOT) -> str:
    """The setting of transparent huge pages: "always", "madvise", "never", or "unknown"."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen.group(1) if chosen else "unknown"


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    nodes = []
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s+(\d+) kB", read_text(directory / "meminfo") or "")
        nodes.append(
            NumaNode(
                node=int(directory.name.removeprefix("node")),
                cpus=read_text(directory / "cpulist") or "",
                memory_bytes=int(total.group(1)) * 1024 if total else 0,
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.node))


def parse_list(text: str) -> tuple[int, ...]:
    """ "0-2,8" -> (0, 1, 2, 8), in the order given; a blank text is an empty list, and what is none a ValueError."""
    numbers: list[int] = []
    for part in text.split(",") if text.strip() else ():
        found = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if found is None:
            raise ValueError(f"expected numbers and ranges like 0-3,8, got {text!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} runs downwards")
        numbers += range(first, last + 1)
    return tuple(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """(0, 1, 2, 8) -> "0-2,8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def list_in(path: Path) -> tuple[int, ...]:
    """The numbers of a file that holds such a list; none where it cannot be read."""
    return parse_list(read_text(path) or "")


def online_cpus(root: Path = ROOT) -> tuple[int, ...]:
    return list_in(root / "sys/devices/system/cpu/online")


def one_cpu_a_core(cpus: Iterable[int], root: Path = ROOT) -> tuple[int, ...]:
    """Of these CPUs, in rising order, the first of each physical core: what is left out are hyperthreads."""
    chosen: list[int] = []
    taken: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in taken:
            chosen.append(cpu)
            topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            taken.update(list_in(topology / "thread_siblings_list"))
    return tuple(chosen)


def cgroup_limits(root: Path = ROOT) -> CgroupLimits:
    """The tightest limits on this process: those of its own group and of all groups around it."""
    groups = _groups(root)
    mounts = _cgroup_mounts(root)
    if "memory" in groups or "cpu" in groups:
        cpus = [_v1_cpus(path) for path in _ancestry(mounts.get("cpu"), groups.get("cpu"))]
        memory = [_v1_memory(path) for path in _ancestry(mounts.get("memory"), groups.get("memory"))]
        return CgroupLimits(1, _tightest(cpus), _tightest(memory))
    directories = _ancestry(mounts.get(""), groups.get(""))
    if not directories:
        return CgroupLimits(0, None, None)
    cpus = [_v2_cpus(path) for path in directories]
    memory = [_v2_memory(path) for path in directories]
    return CgroupLimits(2, _tightest(cpus), _tightest(memory))


def cgroup_cpuset(root: Path = ROOT) -> Cpuset:
    """The CPUs and memory nodes of this process's group: what the innermost group that tells leaves of those around."""
    groups = _groups(root)
    mounts = _cgroup_mounts(root)
    controller = "cpuset" if "cpuset" in groups else ""
    directories = _ancestry(mounts.get(controller), groups.get(controller))[::-1]
    # Version 1 has the first names only from Linux 3.17 on, and only without the mount option noprefix.
    cpus = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    nodes = ("cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems")
    return Cpuset(_first_text(directories, cpus), _first_text(directories, nodes))


def _first_text(directories: list[Path], names: tuple[str, ...]) -> str | None:
    texts = (read_text(directory / name) for directory in directories for name in names)
    return next((text for text in texts if text), None)


def _groups(root: Path) -> dict[str, str]:
    """The group of this process by controller; that of version 2 stands under the empty name."""
    groups = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


@dataclass(frozen=True)
class _Mount:
    directory: Path
    shows: str
    """The group whose tree the directory shows: not always the topmost one in a container."""


def _cgroup_mounts(root: Path) -> dict[str, _Mount]:
    mounts: dict[str, _Mount] = {}
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        fields = before.split()
        if not kind.startswith("cgroup") or len(fields) < 5:
            continue
        mount = _Mount(root / fields[4].lstrip("/"), fields[3])
        controllers = [""] if kind == "cgroup2" else options.split()[-1].split(",")
        for controller in controllers:
            mounts.setdefault(controller, mount)
    return mounts


def _ancestry(mount: _Mount | None, group: str | None) -> list[Path]:
    """The directory of a group and those of all groups around it, as far as they are shown."""
    if mount is None or group is None:
        return []
    inside = group.removeprefix(mount.shows.rstrip("/")) if group.startswith(mount.shows) else ""
    directory = mount.directory
    directories = [directory]
    for part in inside.strip("/").split("/"):
        if part and part != "..":
            directory = directory / part
            directories.append(directory)
    return directories


def _tightest(limits: list[_Number | None]) -> _Number | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _v2_cpus(directory: Path) -> float | None:
    quota, _, period = (read_text(directory / "cpu.max") or "max").partition(" ")
    return None if quota == "max" else int(quota) / int(period)


def _v2_memory(directory: Path) -> int | None:
    limit = read_text(directory / "memory.max") or "max"
    return None if limit == "max" else int(limit)


def _v1_cpus(directory: Path) -> float | None:
    quota = int(read_text(directory / "cpu.cfs_quota_us") or "-1")
    period = int(read_text(directory / "cpu.cfs_period_us") or "0")
    return quota / period if quota > 0 and period > 0 else None


def _v1_memory(directory: Path) -> int | None:
    limit = int(read_text(directory / "memory.limit_in_bytes") or str(_V1_NO_MEMORY_LIMIT))
    return limit if limit < _V1_NO_MEMORY_LIMIT else None
