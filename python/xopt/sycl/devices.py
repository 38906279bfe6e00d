"""The SYCL devices of this machine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xopt.sycl import loading


@dataclass(frozen=True)
class Device:
    number: int
    name: str
    type: str
    """cpu, gpu or other."""
    backend: str
    """opencl, level_zero or other."""
    driver: str
    sub_group_sizes: tuple[int, ...]
    matrix_shapes: tuple[tuple[str, str, int, int, int], ...]
    """Dtypes of A and B, then rows, columns and depth of the tiles that its matrix units (XMX, AMX) multiply."""
    usm_device: bool
    usm_shared: bool
    usm_system: bool
    """Whether kernels may work on any memory of the process: what `device` needs for tensors of the CPU."""
    local_bytes: int

    def __str__(self) -> str:
        shapes = " ".join(f"{a}*{b}:{m}x{n}x{k}" for a, b, m, n, k in self.matrix_shapes)
        memory = {"device": self.usm_device, "shared": self.usm_shared, "system": self.usm_system}
        return (
            f"{self.number}: {self.name} ({self.type}, {self.backend}, driver {self.driver}); matrix shapes"
            f" {shapes or 'none'}; sub-groups {' '.join(map(str, self.sub_group_sizes))};"
            f" USM {' '.join(kind for kind, present in memory.items() if present) or 'none'}"
        )


def available() -> bool:
    """Whether the SYCL part is built and its runtime can be loaded; there may still be no device."""
    if not loading.built():
        return False
    try:
        loading.native()
    except ImportError:
        return False
    return True


def devices() -> tuple[Device, ...]:
    """All of them. The first call starts the SYCL runtime; a process forked later cannot use it."""
    records: list[dict[str, Any]] = loading.native().devices(loading.opencl_driver())
    return tuple(_device(number, record) for number, record in enumerate(records))


def _device(number: int, record: dict[str, Any]) -> Device:
    lists_as_tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    return Device(number, **lists_as_tuples)


def find(name: str) -> Device:
    """By a type ("cpu", "gpu") or a number ("1"); of several the first that works on tensors of the CPU, as not every
    driver's does (PoCL's)."""
    found = devices()
    fitting = [device for device in found if name in (device.type, str(device.number))]
    if fitting:
        return max(fitting, key=lambda device: device.usm_system)
    there = "; ".join(map(str, found)) or "none at all"
    raise RuntimeError(f"xopt.sycl: there is no SYCL device {name!r}; there are: {there}")
