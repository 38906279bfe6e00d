"""`python -m xopt`: what this machine and this build can do, as tables or as JSON."""

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
    parser = argparse.ArgumentParser(prog="python -m xopt", description="What this machine and this build can do.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args(arguments).json
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
