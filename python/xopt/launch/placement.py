"""Which cores each instance gets: from what the machine has and what the user asks for. Nothing here looks at files.

A slot is what a thread of an instance is given: a core (its first CPU), or with logical cores each CPU. Slots of one
node lie together, and siblings side by side, so that instances share neither nodes nor cores where that can be helped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from xopt.launch.errors import LaunchError
from xopt.launch.topology import Core, Topology
from xopt.machine import format_list

CORES_IN_LATENCY_MODE = 4


@dataclass(frozen=True)
class Request:
    """What the user asks for, in the words of the options."""

    ninstances: int | None = None
    ncores_per_instance: int | None = None
    cores_list: tuple[int, ...] | None = None
    nodes_list: tuple[int, ...] | None = None
    latency_mode: bool = False
    throughput_mode: bool = False
    use_logical_cores: bool = False
    use_e_cores: bool = False
    strategy: str = "scatter"
    bind_numa_node: bool = False
    oversubscribe: bool = False


@dataclass(frozen=True)
class Slot:
    cpu: int
    node: int


@dataclass(frozen=True)
class Placement:
    cpus: tuple[int, ...]
    """Those it may run on."""
    threads: int
    nodes: tuple[int, ...]
    fixed: bool
    """Each thread has a CPU of its own among `cpus`; otherwise the system chooses among them."""


@dataclass(frozen=True)
class Placements:
    instances: tuple[Placement, ...]
    reasons: tuple[str, ...]


def place(topology: Topology, request: Request) -> Placements:
    _check(request)
    reasons: list[str] = []
    slots = _slots(topology, request, reasons)
    limited = _is_limited_by_quota(topology, request, slots)
    pool = _within_quota(topology, slots, reasons) if limited else slots
    groups = _oversubscribed(pool, request, reasons) if request.oversubscribe else _divide(pool, request, reasons)
    everywhere = tuple(slot.cpu for slot in slots)
    instances = []
    for group in groups:
        nodes = tuple(sorted({slot.node for slot in (slots if limited else group)}))
        cpus = everywhere if limited else tuple(dict.fromkeys(slot.cpu for slot in group))
        instances.append(Placement(cpus, len(group), nodes, fixed=not limited and not request.oversubscribe))
    _explain_spread(instances, limited, reasons)
    return Placements(tuple(instances), tuple(reasons))


def _check(request: Request) -> None:
    for name in ("ninstances", "ncores_per_instance"):
        number = getattr(request, name)
        if number is not None and number < 1:
            raise LaunchError(f"--{name.replace('_', '-')}: expected 1 or more, got {number}")
    if request.latency_mode and request.throughput_mode:
        raise LaunchError("--latency-mode and --throughput-mode: only one of them can be had")
    for mode in ("latency_mode", "throughput_mode"):
        for name in ("ninstances", "ncores_per_instance"):
            if getattr(request, mode) and getattr(request, name) is not None:
                options = f"--{mode.replace('_', '-')} and --{name.replace('_', '-')}"
                raise LaunchError(f"{options}: the mode sets the number by itself; leave one of them out")
    if request.oversubscribe:
        for name in ("latency_mode", "throughput_mode", "bind_numa_node"):
            if getattr(request, name):
                raise LaunchError(f"--oversubscribe and --{name.replace('_', '-')}: only one of them can be had")
    if request.cores_list is not None and request.nodes_list is not None:
        raise LaunchError("--cores-list and --nodes-list: only one of them can be had")


# ---- The slots ------------------------------------------------------------------------------------------------------


def _slots(topology: Topology, request: Request, reasons: list[str]) -> list[Slot]:
    if topology.offline:
        reasons.append(f"CPUs {format_list(topology.offline)} are offline.")
    if topology.forbidden:
        cpus = format_list(topology.forbidden)
        reasons.append(f"CPUs {cpus} are kept from this process by its affinity or its cgroup's cpuset.")
    if not topology.cores:
        raise LaunchError("no CPU may be used: affinity, cpuset and online CPUs have none in common")
    if request.cores_list is not None:
        return _listed_slots(topology, request.cores_list, reasons)
    cores = _kinds(topology, _in_nodes(topology, request.nodes_list), request, reasons)
    siblings = sum(len(core.cpus) for core in cores)
    if request.use_logical_cores:
        reasons.append(f"All {siblings} hardware threads of {len(cores)} cores are used (--use-logical-cores).")
        return [Slot(cpu, core.node) for core in cores for cpu in core.cpus]
    if siblings > len(cores):
        idle = format_list(sorted(cpu for core in cores for cpu in core.cpus[1:]))
        reasons.append(f"One hardware thread of each core is used; the siblings {idle} stay idle.")
    elif topology.virtual and all(len(core.siblings) == 1 for core in cores):
        reasons.append("This virtual machine shows no siblings; some of its CPUs may share a core nevertheless.")
    return [Slot(core.cpus[0], core.node) for core in cores]


def _listed_slots(topology: Topology, cores_list: tuple[int, ...], reasons: list[str]) -> list[Slot]:
    twice = [cpu for cpu, count in Counter(cores_list).items() if count > 1]
    if twice:
        raise LaunchError(f"--cores-list: {format_list(sorted(twice))} listed more than once")
    core_of = {cpu: core for core in topology.cores for cpu in core.cpus}
    missing = sorted(set(cores_list) - set(core_of))
    if missing:
        causes = {"offline": topology.offline, "kept from this process by affinity or cpuset": topology.forbidden}
        said = [f"{format_list(cpu for cpu in missing if cpu in cpus)} {cause}" for cause, cpus in causes.items()]
        said = [words for words in said if words[0].isdigit()]
        raise LaunchError(
            f"--cores-list: {format_list(missing)} cannot be used{': ' + ', '.join(said) if said else ''}; "
            f"usable are {format_list(topology.cpus)}"
        )
    reasons.append(f"CPUs {format_list(cores_list)} were asked for (--cores-list).")
    shared = Counter(core_of[cpu] for cpu in cores_list)
    for core, count in shared.items():
        if count > 1:
            reasons.append(f"CPUs {format_list(core.cpus)} are siblings on one core.")
    return [Slot(cpu, core_of[cpu].node) for cpu in cores_list]


def _in_nodes(topology: Topology, nodes_list: tuple[int, ...] | None) -> list[Core]:
    if nodes_list is None:
        return list(topology.cores)
    having = sorted({core.node for core in topology.cores})
    for node in nodes_list:
        if node not in having:
            known = node in [other.number for other in topology.nodes]
            what = "has no CPU that may be used" if known else "does not exist"
            raise LaunchError(f"--nodes-list: node {node} {what}; nodes with usable CPUs are {format_list(having)}")
    return [core for core in topology.cores if core.node in nodes_list]


def _kinds(topology: Topology, cores: list[Core], request: Request, reasons: list[str]) -> list[Core]:
    if not topology.hybrid:
        return cores
    fast = [core for core in cores if not core.efficient]
    count = len(cores) - len(fast)
    if request.use_e_cores:
        reasons.append(f"{len(fast)} P-cores and {count} E-cores are used alike (--use-e-cores).")
    elif fast:
        reasons.append(f"{count} E-cores stay idle: a thread on one would keep all others waiting (--use-e-cores).")
    return cores if request.use_e_cores or not fast else fast


# ---- The quota ------------------------------------------------------------------------------------------------------


def _is_limited_by_quota(topology: Topology, request: Request, slots: list[Slot]) -> bool:
    """A list of cores is a wish that is granted as it is, and so is crowding."""
    explicit = request.cores_list is not None or request.oversubscribe
    return topology.quota is not None and topology.quota < len(slots) and not explicit


def _within_quota(topology: Topology, slots: list[Slot], reasons: list[str]) -> list[Slot]:
    """Threads beyond the quota would have all of them stopped for part of each period."""
    quota = topology.quota or 1.0
    count = max(int(quota), 1)
    reasons.append(
        f"The cgroup grants the time of {quota:g} CPUs, so that {count} of {len(slots)} cores are counted. "
        "Threads are not bound to cores: other groups with such a quota would bind theirs to the same ones."
    )
    return slots[:count]


# ---- Dividing -------------------------------------------------------------------------------------------------------


def _divide(slots: list[Slot], request: Request, reasons: list[str]) -> list[list[Slot]]:
    by_node: dict[int, list[Slot]] = {}
    for slot in slots:
        by_node.setdefault(slot.node, []).append(slot)
    nodes = list(by_node.values())
    if request.throughput_mode:
        reasons.append(f"One instance for each of {len(nodes)} NUMA nodes with usable cores (--throughput-mode).")
        return nodes
    size = CORES_IN_LATENCY_MODE if request.latency_mode else request.ncores_per_instance
    number = request.ninstances
    if size is None and number is None:
        reasons.append(f"One instance with all {len(slots)} cores: nothing else was asked for.")
        size, number = len(slots), 1
    bound = request.bind_numa_node
    if size is None:
        assert number is not None
        size = _size_of(number, slots, nodes, bound)
        _refuse_rest(len(slots), number, size)
    elif number is None:
        number = sum(len(node) // size for node in nodes) if bound else len(slots) // size
        if number == 0:
            largest = max(map(len, nodes)) if bound else len(slots)
            where = "the largest node has" if bound else "usable are"
            raise LaunchError(f"an instance of {size} cores does not fit: {where} {largest}")
        _refuse_rest(len(slots), number, size)
    return _groups(slots, nodes, number, size, request, reasons)


def _size_of(number: int, slots: list[Slot], nodes: list[list[Slot]], bound: bool) -> int:
    if number > len(slots):
        raise _too_many(number, 1, len(slots))
    if not bound:
        return len(slots) // number
    for size in range(len(slots) // number, 0, -1):
        if sum(len(node) // size for node in nodes) >= number:
            return size
    raise AssertionError("with one core each, they would have fitted")


def _refuse_rest(available: int, number: int, size: int) -> None:
    """Cores left over are an error unless both numbers were given: nobody looks whether all of a machine is busy."""
    rest = available - number * size
    if rest == 0:
        return
    even = [count for count in range(1, available + 1) if available % count == 0]
    near = sorted(sorted(even, key=lambda count: abs(count - number))[:3])
    raise LaunchError(
        f"{number} instances of {size} cores leave {rest} of {available} cores idle. Say --ninstances {number} "
        f"--ncores-per-instance {size} if they are to stay idle; {', '.join(map(str, near))} instances would use all"
    )


def _too_many(number: int, size: int, available: int) -> LaunchError:
    return LaunchError(
        f"{number} instances of {size} cores need {number * size} cores, and {available} are usable "
        "(--oversubscribe lets instances share cores)"
    )


def _groups(
    slots: list[Slot], nodes: list[list[Slot]], number: int, size: int, request: Request, reasons: list[str]
) -> list[list[Slot]]:
    if number * size > len(slots):
        raise _too_many(number, size, len(slots))
    room = [len(node) // size for node in nodes]
    if sum(room) < number:
        if request.bind_numa_node:
            counts = ", ".join(str(len(node)) for node in nodes)
            raise LaunchError(
                f"--bind-numa-node: {number} instances of {size} cores do not fit into nodes of {counts} cores: "
                f"{sum(room)} would"
            )
        return [slots[start : start + size] for start in range(0, number * size, size)]
    rest = len(slots) - number * size
    if rest:
        reasons.append(f"{rest} of {len(slots)} cores stay idle, as asked for.")
    shares = _shares(room, number, request.strategy)
    if rest and len(nodes) > 1:
        reasons.append(f"The instances are placed by --strategy {request.strategy}: {shares} on the nodes in turn.")
    return [
        node[start : start + size]
        for node, count in zip(nodes, shares, strict=True)
        for start in range(0, count * size, size)
    ]


def _shares(room: list[int], number: int, strategy: str) -> list[int]:
    """How many instances each node takes: filled one after the other, or as evenly as there is room."""
    counts = [0] * len(room)
    for _ in range(number):
        free = [index for index in range(len(room)) if counts[index] < room[index]]
        chosen = free[0] if strategy == "close" else min(free, key=lambda index: (counts[index], index))
        counts[chosen] += 1
    return counts


def _oversubscribed(slots: list[Slot], request: Request, reasons: list[str]) -> list[list[Slot]]:
    number = request.ninstances or 1
    size = request.ncores_per_instance or max(len(slots) // number, 1)
    if number * size > len(slots):
        reasons.append(f"{number} instances of {size} cores share {len(slots)} (--oversubscribe).")
    return [[slots[(index * size + step) % len(slots)] for step in range(size)] for index in range(number)]


def _explain_spread(instances: list[Placement], limited: bool, reasons: list[str]) -> None:
    across = [index for index, instance in enumerate(instances) if len(instance.nodes) > 1]
    if across and not limited:
        reasons.append(f"Instances {format_list(across)} span NUMA nodes (--bind-numa-node forbids that).")
