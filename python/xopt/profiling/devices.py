"""Kernels of other devices than the CPU: categories, what they move and compute, and how long each device was busy.

A kernel is known by the operator that launched it (the outermost one that does work), or the region of a compiled
kernel; sizes and dtypes are those of its arguments. Where one operator launches several kernels, the longest has done
its work.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from xopt.profiling.analysis import compare, named_arguments
from xopt.profiling.calls import Call
from xopt.profiling.category import OVERHEAD, category_of, device_category
from xopt.profiling.events import DeviceKernel, Op, is_operator
from xopt.profiling.result import LAUNCHED_BY, Category, Device, Kernel
from xopt.profiling.timeline import covered
from xopt.profiling.work import Work, tensors_in, work_of
from xopt.roofs import Roofs


@dataclass
class _Group:
    """Calls of one row of the table."""

    op: Op | None
    work: Work | None
    spans: list[tuple[int, int]] = field(default_factory=list)


def devices_of(kernels: Iterable[DeviceKernel], roots: Iterable[Op]) -> dict[str, Device]:
    """By torch's names of devices. Their own names and roofs are the caller's."""
    by_device: dict[str, list[DeviceKernel]] = {}
    owners: dict[int, Op] = {}
    for root in roots:
        _find_owners(root, None, owners)
    for kernel in kernels:
        owner = owners.get(id(kernel.op), kernel.op)
        by_device.setdefault(kernel.device, []).append(dataclasses.replace(kernel, op=owner))
    return {name: _device(by_device[name]) for name in sorted(by_device)}


def _find_owners(op: Op, around: Op | None, owners: dict[int, Op]) -> None:
    """By the id of each operator, the outermost one around it that does work, and not only calls others."""
    works = is_operator(op.name) and category_of(op.name, op.overload) != OVERHEAD
    if around is None and works:
        around = op
    if around is not None:
        owners[id(op)] = around
    for child in op.children:
        _find_owners(child, around, owners)


def _device(kernels: list[DeviceKernel]) -> Device:
    device = Device("", covered((kernel.start, kernel.end) for kernel in kernels) / 1e9)
    workers = _workers(kernels)
    groups: dict[tuple[str, str], _Group] = {}
    for kernel in kernels:
        op = kernel.op
        category = device_category(kernel.name, op.name if op is not None and is_operator(op.name) else "")
        work = _work(op, category) if op is not None else None
        name = kernel.name
        if op is not None and work is not None and is_operator(op.name):
            name += LAUNCHED_BY + work.name
        group = groups.setdefault((name, category), _Group(op, None))
        group.work = group.work or (work if id(kernel) in workers else None)
        group.spans.append((kernel.start, kernel.end))
    for (name, category), group in groups.items():
        kernel_row = _row(name, category, group)
        device.kernels.append(kernel_row)
        entry = device.categories.setdefault(category, Category())
        entry.seconds += kernel_row.seconds
        entry.calls += kernel_row.calls
    device.kernels.sort(key=lambda kernel: -kernel.seconds)
    return device


def compare_with_roofs(device: Device, roofs: Roofs) -> None:
    for kernel in device.kernels:
        compare(kernel, roofs)


def _workers(kernels: list[DeviceKernel]) -> set[int]:
    """The ids of those that did their operators' work."""
    longest: dict[int, DeviceKernel] = {}
    for kernel in kernels:
        if kernel.op is None:
            continue
        other = longest.get(id(kernel.op))
        if other is None or kernel.end - kernel.start > other.end - other.start:
            longest[id(kernel.op)] = kernel
    return {id(kernel) for kernel in longest.values()}


def _work(op: Op, category: str) -> Work | None:
    if is_operator(op.name):
        return _known_work(_Key(op), category)
    tensors = tensors_in(op.arguments)
    if not tensors:
        return None
    moved = sum(tensor.bytes for tensor in tensors)
    updated = _updated_arguments(str(op.notes.get("kernel_file", "")))
    moved += sum(tensor.bytes for tensor in tensors_in([op.arguments[at] for at in updated if at < len(op.arguments)]))
    flop = op.notes.get("kernel_flop")
    return Work(op.name, tensors[0].dtype, int(flop) if isinstance(flop, (int, float)) else 0, moved, True)


class _Key:
    """An operator's call, to be looked up by what it was called with."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self._key = op.name, op.overload, repr(op.arguments)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other._key == self._key


@functools.lru_cache(maxsize=4096)
def _known_work(key: _Key, category: str) -> Work:
    return work_of(Call(key.op.name, category, key.op.module, key.op))


@functools.lru_cache(maxsize=1024)
def _updated_arguments(source: str) -> tuple[int, ...]:
    """Places of the arguments that a kernel of TorchInductor's both reads and writes, as its source names them."""
    try:
        found = re.search(r"^def \w+\(([^)]*)\)", Path(source).read_text(), re.MULTILINE) if source else None
    except OSError:
        return ()
    names = found[1].split(",") if found else []
    return tuple(at for at, name in enumerate(names) if name.strip().startswith("in_out_ptr"))


def _row(name: str, category: str, group: _Group) -> Kernel:
    op, work = group.op, group.work
    seconds = sum(end - start for start, end in group.spans) / 1e9
    return Kernel(
        name=name,
        category=category,
        module=op.module if op else None,
        calls=len(group.spans),
        seconds=seconds,
        own_seconds=seconds,
        flop=work.flop if work else 0,
        bytes=work.bytes if work else 0,
        dtype=work.dtype if work else "",
        operator=op.name if op else "",
        overload=op.overload if op else "",
        arguments=named_arguments(op, []) if op is not None and is_operator(op.name) else {},
    )
