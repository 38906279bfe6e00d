"""A profile as text."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from xopt.profiling.category import CATEGORIES
from xopt.profiling.result import LAUNCHED_BY, Device, Kernel, Profile

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 30
_MOST_LETTERS = 70
WIDTH = 190


def text_of(profile: Profile) -> str:
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=WIDTH, highlight=False, markup=False)
    if not profile.steps:
        console.print("xopt.profile: nothing was profiled yet; it is filled in when its block ends")
        return text.getvalue()
    for line in headline(profile):
        console.print(line)
    console.print(_category_table(profile))
    console.print(_kernel_table("Kernels by time, a step", profile.kernels, profile.steps))
    for name, device in profile.devices.items():
        for line in _device_headline(profile, name, device):
            console.print(line)
        console.print(_device_table(profile, name, device))
        console.print(_kernel_table(f"Kernels of {name}, a step", device.kernels, profile.steps, of_device=True))
    for finding in [*profile.findings, *profile.notes]:
        console.print(f"- {finding}")
    return text.getvalue()


def headline(profile: Profile) -> list[str]:
    step = profile.wall_seconds / profile.steps
    machine = profile.machine
    steps, threads = _counted(profile.steps, "step"), _counted(profile.threads, "thread")
    lines = [
        f"{profile.title or 'profile'}: {duration(step)} a step with the profiler on"
        + _plain(profile)
        + f", {steps}, {threads}",
        f"{machine.get('cpu', '')}, level {machine.get('level', '')}, torch {machine.get('torch', '')}",
    ]
    facts = []
    if profile.busy_share is not None:
        against = "of the time without profiler" if profile.plain_step_seconds else "of the time"
        facts.append(f"kernels run {profile.busy_share:.0%} {against}")
    if profile.thread_efficiency is not None:
        facts.append(f"threads of parallel regions work {profile.thread_efficiency:.0%} of theirs")
    memory = profile.memory
    facts.append(f"{memory.page_faults:.0f} page faults")
    if memory.allocations is not None:
        facts.append(f"{memory.allocations} allocations of {size(memory.allocated_bytes or 0)}")
    facts.append(f"{profile.flop / 1e9:.3g} GFLOP a step")
    return [*lines, ", ".join(facts)]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _plain(profile: Profile) -> str:
    if profile.overhead is None:
        return ""
    plain = sorted(profile.plain_step_seconds)
    return f", {duration(plain[len(plain) // 2])} without ({profile.overhead:+.1%})"


def _category_table(profile: Profile) -> Table:
    from rich.table import Table

    table = Table(title="Categories, a step", title_justify="left")
    for header in ("category", "time", "share", "calls"):
        table.add_column(header, justify="left" if header == "category" else "right")
    total = sum(category.seconds for category in profile.categories.values()) or 1.0
    for name in sorted(profile.categories, key=CATEGORIES.index):
        found = profile.categories[name]
        calls = f"{found.calls / profile.steps:.4g}" if found.calls else ""
        table.add_row(name, duration(found.seconds / profile.steps), f"{found.seconds / total:.1%}", calls)
    table.add_row(
        "wall time", duration(profile.wall_seconds / profile.steps), f"{total / profile.wall_seconds:.1%}", ""
    )
    return table


def _kernel_table(title: str, kernels: list[Kernel], steps: int, *, of_device: bool = False) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    headers = (
        *("time", "share", "calls", "each", "FLOP", "bytes", "TFLOP/s", "GB/s", "FLOP/byte"),
        *("of roof", "bound", "threads"),
    )
    table.add_column("kernel", overflow="fold", max_width=52)
    table.add_column("module", overflow="fold", max_width=32)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    total = sum(kernel.seconds for kernel in kernels) or 1.0
    for kernel in kernels[:MOST_ROWS]:
        name = shortened(kernel.name) if of_device else kernel.name
        table.add_row(name, kernel.module or "", *_cells(kernel, steps, total))
    left = kernels[MOST_ROWS:]
    if left:
        seconds = sum(kernel.seconds for kernel in left)
        table.add_row(f"{len(left)} more", "", duration(seconds / steps), f"{seconds / total:.1%}")
    return table


def shortened(name: str) -> str:
    """A device's kernel: names of C++ templates go on for lines; what launched it, behind them, is kept."""
    kernel, mark, launcher = name.partition(LAUNCHED_BY)
    return (kernel if len(kernel) <= _MOST_LETTERS else kernel[: _MOST_LETTERS - 3] + "...") + mark + launcher


def _cells(kernel: Kernel, steps: int, total: float) -> list[str]:
    share = kernel.share_of_roof
    efficiency = kernel.thread_efficiency
    return [
        duration(kernel.seconds / steps),
        f"{kernel.seconds / total:.1%}",
        f"{kernel.calls / steps:.4g}" if kernel.operator else "",
        duration(kernel.seconds_per_call) if kernel.operator else "",
        scaled(kernel.flop) if kernel.flop else "",
        size(kernel.bytes) if kernel.bytes and kernel.operator else "",
        f"{kernel.flop_per_second / 1e12:.3f}" if kernel.flop else "",
        f"{kernel.bytes_per_second / 1e9:.1f}" if kernel.bytes else "",
        f"{kernel.intensity:.3g}" if kernel.flop else "",
        "" if share is None else f"{share:.0%}",
        kernel.bound,
        "" if efficiency is None else f"{efficiency:.0%}",
    ]


def _device_headline(profile: Profile, name: str, device: Device) -> list[str]:
    busy = profile.device_busy_share(name) or 0.0
    line = f"{name} ({device.name}): busy {busy:.0%} of a step"
    if not device.roofs:
        return [line]
    roofs = [f"{kind} {rate / 1e12:.3g} TFLOP/s" for kind, rate in device.roofs.items() if kind != "copy"]
    return [line, f"measured roofs: {', '.join(roofs)}, copying {device.roofs['copy'] / 1e9:.0f} GB/s"]


def _device_table(profile: Profile, name: str, device: Device) -> Table:
    from rich.table import Table

    table = Table(title=f"Categories of {name}, a step", title_justify="left")
    for header in ("category", "time", "share", "calls"):
        table.add_column(header, justify="left" if header == "category" else "right")
    total = device.kernel_seconds or 1.0
    for category, found in sorted(device.categories.items(), key=lambda item: -item[1].seconds):
        seconds, calls = duration(found.seconds / profile.steps), f"{found.calls / profile.steps:.4g}"
        table.add_row(category, seconds, f"{found.seconds / total:.1%}", calls)
    return table


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def scaled(count: float) -> str:
    for unit in ("", " K", " M", " G"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GB"
