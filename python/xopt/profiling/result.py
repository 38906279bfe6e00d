"""A profile: plain data, which goes to JSON and back, and shows itself."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
LAUNCHED_BY = " < "  # in the name of a device's kernel, before the operator that launched it


@dataclass
class Category:
    seconds: float = 0.0
    """Of the wall time of all steps."""
    calls: int = 0


@dataclass
class Kernel:
    """All calls of one kernel: the same operator with the same sizes and fused parts, in modules of the same place."""

    name: str
    category: str
    module: str | None
    """The path in the model, with * for numbers that differ."""
    calls: int
    seconds: float
    """Of the wall time of all steps. Where threads work on different kernels at once, each has a part."""
    own_seconds: float
    """That its calls took, whatever other threads did."""
    flop: int
    """Of one call, as `bytes`."""
    bytes: int
    """Inputs and outputs, each once."""
    dtype: str
    operator: str
    overload: str
    arguments: dict[str, Any]
    """Of a call, by the names of the schema: {"shape", "dtype", "strides"} for a tensor, {"dtype"} for a dtype,
    {"memory_format"} for a memory format. Empty where the operator is not known."""
    share_of_roof: float | None = None
    """Of what this machine's measured roofs allow for its operations and bytes; above 1 where data come from caches."""
    bound: str = ""
    """compute, memory, or overhead: where the work itself would take a few microseconds."""
    thread_efficiency: float | None = None
    """How much of the time of its parallel regions all their threads worked; None: not known."""

    @property
    def seconds_per_call(self) -> float:
        return self.own_seconds / self.calls

    @property
    def flop_per_second(self) -> float:
        return self.flop / self.seconds_per_call if self.own_seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds_per_call if self.own_seconds else 0.0

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flop / self.bytes if self.bytes else 0.0


@dataclass
class Module:
    kind: str
    seconds: float = 0.0
    """Of its own, without that of modules inside."""
    calls: int = 0


@dataclass
class Device:
    """A GPU, or what else torch runs kernels on beside the CPU."""

    name: str
    busy_seconds: float = 0.0
    """Of all steps: when at least one kernel ran."""
    categories: dict[str, Category] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    """By time."""
    roofs: dict[str, float] = field(default_factory=dict)
    """Operations a second by dtype, and bytes a second for "copy"; empty where they were not measured."""

    @property
    def kernel_seconds(self) -> float:
        """Of all kernels, those that ran at the same time each."""
        return sum(kernel.seconds for kernel in self.kernels)


@dataclass
class Memory:
    """Of one step."""

    page_faults: float = 0.0
    major_page_faults: float = 0.0
    allocations: int | None = None
    """Of tensors, in a step of its own: torch does not tell of them while it records all threads. None: not counted."""
    allocated_bytes: int | None = None


@dataclass
class Profile:
    """What `xopt.profile` returns and `xopt.profiler` fills in when its block ends."""

    title: str = ""
    error: str | None = None
    """The exception that ended the profile early."""
    steps: int = 0
    step_seconds: list[float] = field(default_factory=list)
    """By this process's clock, with the profiler on."""
    plain_step_seconds: list[float] = field(default_factory=list)
    """Of the same steps without the profiler; empty where they were not run."""
    categories: dict[str, Category] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    """By time."""
    devices: dict[str, Device] = field(default_factory=dict)
    """Other devices than the CPU, by torch's names: "cuda:0"."""
    modules: dict[str, Module] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    threads: int = 0
    kernel_seconds: float = 0.0
    """Of the wall time of all steps: when at least one kernel ran."""
    machine: dict[str, Any] = field(default_factory=dict)
    roofs: dict[str, float] = field(default_factory=dict)
    """Operations a second by dtype, and bytes a second for "read" and "copy"; empty where they were not measured."""
    timeline: list[list[Any]] = field(default_factory=list)
    """[step, start in us from its start, us, thread, name, category] of each piece of time."""
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT

    @property
    def wall_seconds(self) -> float:
        """Of all steps, with the profiler on."""
        return sum(self.step_seconds)

    @property
    def busy_share(self) -> float | None:
        """The time in kernels over the wall time measured without the profiler, where that was; else with it."""
        return self._share_of_step(self.kernel_seconds)

    def device_busy_share(self, device: str) -> float | None:
        """The same of another device."""
        return self._share_of_step(self.devices[device].busy_seconds)

    def _share_of_step(self, seconds: float) -> float | None:
        if not self.steps:
            return None
        plain = self.plain_step_seconds
        step = sorted(plain)[len(plain) // 2] if plain else self.wall_seconds / self.steps
        return min(1.0, seconds / self.steps / step)

    @property
    def overhead(self) -> float | None:
        """How much longer a step took with the profiler on: medians; None where that was not measured."""
        if not self.plain_step_seconds or not self.step_seconds:
            return None
        plain, profiled = sorted(self.plain_step_seconds), sorted(self.step_seconds)
        return profiled[len(profiled) // 2] / plain[len(plain) // 2] - 1

    @property
    def flop(self) -> float:
        """Of one step."""
        return sum(kernel.flop * kernel.calls for kernel in self.kernels) / max(self.steps, 1)

    @property
    def thread_efficiency(self) -> float | None:
        """Of all parallel regions that are known, by their time."""
        known = [kernel for kernel in self.kernels if kernel.thread_efficiency is not None]
        weight = sum(kernel.own_seconds for kernel in known)
        return (
            sum((kernel.thread_efficiency or 0) * kernel.own_seconds for kernel in known) / weight if weight else None
        )

    # ---- Showing it --------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        from xopt.profiling.tables import text_of

        return text_of(self)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Of what `to_json` or `trace` wrote."""
        content = json.loads(text)
        if isinstance(content, dict):
            content = content.get("xopt", content)
        if not isinstance(content, dict) or content.get("format") != FORMAT or "kernels" not in content:
            raise ValueError(f"Profile.from_json: text: expected a profile of format {FORMAT}, as to_json writes it")
        content["categories"] = {name: Category(**value) for name, value in content["categories"].items()}
        content["kernels"] = [Kernel(**value) for value in content["kernels"]]
        content["modules"] = {path: Module(**value) for path, value in content["modules"].items()}
        content["memory"] = Memory(**content["memory"])
        content["devices"] = {name: _device(value) for name, value in content["devices"].items()}
        return cls(**content)

    def to_html(self, path: str | Path) -> None:
        """Writes a report that needs neither network nor other files."""
        from xopt.profiling.html import page_of

        Path(path).write_text(page_of(self), encoding="utf-8")

    def trace(self, path: str | Path) -> None:
        """Writes the timeline for Perfetto (ui.perfetto.dev) and chrome://tracing."""
        from xopt.profiling.chrome import trace_of

        Path(path).write_text(json.dumps(trace_of(self)), encoding="utf-8")


def _device(content: dict[str, Any]) -> Device:
    content["categories"] = {name: Category(**value) for name, value in content["categories"].items()}
    content["kernels"] = [Kernel(**value) for value in content["kernels"]]
    return Device(**content)
