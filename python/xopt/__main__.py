"""`python -m xopt`: what this machine and this build can do, as tables or as JSON; `cache`: what autotuning found."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import xopt
from xopt import machine

if TYPE_CHECKING:
    from rich.table import Table


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.command == "cache":
        _cache(options.action, options.json)
    else:
        _show(options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m xopt", description="What this machine and this build can do.")
    as_json = {"action": "store_true", "help": "print JSON"}
    parser.add_argument("--json", **as_json)  # type: ignore[arg-type]
    commands = parser.add_subparsers(dest="command")
    text = "what autotuning has found on this machine, kept on disk"
    cache = commands.add_parser("cache", help=text, description=f"{text[0].upper()}{text[1:]}.")
    cache.add_argument("action", nargs="?", choices=("list", "clear"), default="list")
    cache.add_argument("--json", default=argparse.SUPPRESS, **as_json)  # type: ignore[arg-type]
    return parser


def _show(as_json: bool) -> None:
    found, kernels = xopt.capabilities(), xopt.kernels()
    if as_json:
        sycl, listed = _sycl_devices(), [asdict(kernel) for kernel in kernels]
        print(json.dumps({**asdict(found), "sycl_devices": sycl, "kernels": listed}, indent=2))
        return

    from rich.console import Console

    console = Console()
    console.print(_fact_table("CPU", _cpu_facts(found)))
    console.print(_fact_table("Process and machine", _machine_facts(found)))
    console.print(_kernel_table(kernels, found))


def _cache(action: str, as_json: bool) -> None:
    from rich.console import Console

    store = xopt.tuning.open_store()
    console = Console(markup=False, highlight=False)
    if action == "clear":
        count = store.clear()
        if as_json:
            print(json.dumps({"file": str(store.path), "cleared": count}))
        else:
            console.print(f"{store.path}: {count} entries cleared", soft_wrap=True)
        return
    entries = store.entries()
    if as_json:
        print(json.dumps({"file": str(store.path), "entries": [asdict(entry) for entry in entries]}, indent=2))
        return
    console.print(f"{store.path}: {len(entries)} entries", soft_wrap=True)
    groups: dict[tuple[str, str, str], list[xopt.tuning.Tuned]] = {}
    for entry in entries:
        groups.setdefault((entry.cpu, entry.version, entry.tuned.level), []).append(entry.tuned)
    for (cpu, version, level), tuned in groups.items():
        console.print(_tuned_table(f"{cpu}, level {level}, xopt {version}", tuned))


def _tuned_table(title: str, tuned: "Iterable[xopt.tuning.Tuned]") -> "Table":
    from rich.table import Table

    table = Table("kernel", "size", "threads", "instance", "times as fast", title=title, title_justify="left")
    for one in tuned:
        gain = "" if one.is_default else f"{one.gain:.2f}"
        table.add_row(f"{one.kernel}[{one.dtype}]", one.size, str(one.threads), one.instance, gain)
    return table


def _cpu_facts(found: xopt.Capabilities) -> list[tuple[str, str]]:
    features = found.features
    caches = found.caches
    level = found.level if found.level == found.levels[-1] else f"{found.level} (capped)"
    facts = [
        ("model", found.cpu or "unknown"),
        ("levels", " ".join(found.levels)),
        ("level in use", level),
        ("features", " ".join(name for name, present in features.items() if present and name != "amx_permitted")),
        ("caches", f"L1d {_size(caches.l1d_bytes)}, L2 {_size(caches.l2_bytes)}, L3 {_size(caches.l3_bytes)}"),
    ]
    if features["amx_tile"] and not features["amx_permitted"]:
        facts.append(("AMX", "the CPU has it, but the system denies it to this process"))
    if found.emulated:
        facts.append(("emulated", "plain C++ stands for AMX and AVX512-BF16: a build for tests"))
    return facts


def _machine_facts(found: xopt.Capabilities) -> list[tuple[str, str]]:
    nodes = [f"{node.node}: CPUs {node.cpus or 'none'}, {_size(node.memory_bytes)}" for node in found.numa_nodes]
    cgroup = found.cgroup
    cpus = "no CPU limit" if cgroup.cpus is None else f"{cgroup.cpus:g} CPUs"
    memory = "no memory limit" if cgroup.memory_bytes is None else _size(cgroup.memory_bytes)
    sycl = _sycl_devices()
    return [
        ("xopt", found.xopt_version),
        ("torch", found.torch_version),
        ("threads", str(found.threads)),
        ("affinity", machine.format_list(found.affinity)),
        ("OpenMP", "\n".join(found.openmp) or "none found"),
        ("NUMA nodes", "\n".join(nodes) or "unknown"),
        ("allocator", found.allocator),
        ("huge pages", found.huge_pages),
        ("cgroup", f"v{cgroup.version}: {cpus}, {memory}" if cgroup.version else "none"),
        ("SYCL", "not installed" if sycl is None else "\n".join(sycl) or "no devices"),
    ]


def _sycl_devices() -> list[str] | None:
    """In words; None: the SYCL part is not there. Asked for here alone, since it starts the SYCL runtime."""
    return [str(device) for device in xopt.sycl.devices()] if xopt.sycl.available() else None


def _fact_table(title: str, facts: Iterable[tuple[str, str]]) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    return table


def _kernel_table(kernels: tuple[xopt.KernelInfo, ...], found: xopt.Capabilities) -> "Table":
    from rich.table import Table

    by_kernel: dict[tuple[str, str], list[xopt.KernelInfo]] = {}
    for kernel in kernels:
        by_kernel.setdefault((kernel.name, kernel.dtype), []).append(kernel)
    table = Table(title="Kernels", title_justify="left")
    for column in ("kernel", "dtype", "levels", f"chosen at {found.level}"):
        table.add_column(column, overflow="fold")
    for (name, dtype), variants in by_kernel.items():
        chosen = next((variant.isa for variant in variants if variant.chosen), "none")
        table.add_row(name, dtype, " ".join(variant.isa for variant in variants), chosen)
    return table


def _size(count: int) -> str:
    if count <= 0:
        return "unknown"
    size, units = float(count), ["B", "KB", "MB", "GB", "TB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f}".removesuffix(".0") + f" {units[0]}"


if __name__ == "__main__":
    main()
