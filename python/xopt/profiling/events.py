"""What torch's profiler recorded, as plain data: for each thread a forest of operators with their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from xopt.profiling.module_marks import PREFIX, STEP

DTYPE_NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.int8: "s8",
    torch.uint8: "u8",
    torch.int32: "s32",
    torch.int64: "s64",
    torch.bool: "bool",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def is_operator(name: str) -> bool:
    """Whether it is the name of an operator, and not of a region that somebody has marked."""
    return "::" in name


def dtype_of_name(name: str) -> torch.dtype:
    found = DTYPES.get(name) or getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@dataclass(frozen=True)
class TensorArgument:
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    pointer: int = field(default=0, compare=False, repr=False)
    """Where its memory began; 0: not known."""

    @property
    def bytes(self) -> int:
        """Of its elements, each once: a dimension of stride 0 holds one."""
        count = 1
        for size, stride in zip(self.shape, self.strides or self.shape, strict=False):
            count *= size if stride != 0 or size == 0 else 1
        return count * dtype_of_name(self.dtype).itemsize


@dataclass
class Op:
    """A call of an operator, or a region that somebody has marked."""

    name: str
    overload: str
    start: int
    """Nanoseconds since 1970, as `end`."""
    end: int
    thread: int
    """Linux's id."""
    arguments: list[Any] = field(default_factory=list)
    """In the order of the schema: TensorArgument, list of them, scalar, list of scalars; None: something else."""
    children: list[Op] = field(default_factory=list)
    module: str | None = None
    """The path of the module whose forward called it; None: none did."""
    launches: bool = False
    """Whether it, or what it calls, launched a kernel of another device."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What was recorded beside arguments: TorchInductor says of a kernel of Triton's where its source stands."""

    def walk(self) -> Iterator[Op]:
        """It and all that it calls."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class DeviceKernel:
    """What ran on another device than the CPU."""

    name: str
    start: int
    end: int
    device: str
    stream: int
    op: Op | None = None
    """The operator, or the region of a compiled kernel, that launched it; None: not known."""


@dataclass
class Events:
    roots: list[Op]
    steps: list[tuple[int, int]]
    """Start and end of each marked step."""
    main_thread: int
    device: list[DeviceKernel]


def read_events(results: Any) -> Events:
    """Of torch's `profile.profiler.kineto_results`."""
    # Calls of a device's runtime are events of the CPU as well, with numbers of their own that are operators' too; what
    # tells them apart is that they are linked to operators.
    flat = {
        event.correlation_id(): event
        for event in results.events()
        if str(event.device_type()).endswith("CPU") and event.linked_correlation_id() == 0
    }
    reader = _Reader(flat)
    roots: list[Op] = []
    for event in results.experimental_event_tree():
        roots += reader.read(event, None)
    device = _device_kernels(results, reader.by_number)
    launching = {id(kernel.op) for kernel in device}
    for root in roots:
        _mark_launches(root, launching)
    return Events(roots, reader.steps, reader.main_thread, device)


def _mark_launches(op: Op, launching: set[int]) -> bool:
    inside = [_mark_launches(child, launching) for child in op.children]
    op.launches = id(op) in launching or any(inside)
    return op.launches


class _Reader:
    def __init__(self, flat: dict[int, Any]) -> None:
        self.steps: list[tuple[int, int]] = []
        self.main_thread = 0
        self.by_number: dict[int, Op] = {}
        self._flat = flat

    def read(self, event: Any, module: str | None) -> list[Op]:
        """The operator of an event; those inside, where it is only a mark."""
        kind = str(event.tag)
        if not kind.endswith("TorchOp"):
            return [op for child in event.children for op in self.read(child, module)]
        name = event.name
        if name.startswith(PREFIX):
            module = name.removeprefix(PREFIX)
            return [op for child in event.children for op in self.read(child, module)]
        flat = self._flat.get(event.correlation_id)
        thread = flat.device_resource_id() if flat is not None else event.start_tid
        if name == STEP:
            self.steps.append((event.start_time_ns, event.end_time_ns))
            self.main_thread = thread
            return [op for child in event.children for op in self.read(child, module)]
        op = Op(name, event.overload_name, event.start_time_ns, event.end_time_ns, thread, module=module)
        op.arguments = _arguments(event.extra_fields.inputs, flat)
        if flat is not None and not is_operator(name):
            op.notes = dict(flat.kwinputs())
        self.by_number[event.correlation_id] = op
        for child in event.children:
            op.children += self.read(child, module)
        return [op]


def _arguments(inputs: list[Any], flat: Any) -> list[Any]:
    concrete = flat.concrete_inputs() if flat is not None else []
    found: list[Any] = []
    for place, value in enumerate(inputs):
        if isinstance(value, (list, tuple)):
            found.append([_tensor(item) for item in value])
        elif hasattr(value, "sizes"):
            found.append(_tensor(value))
        elif value is None and place < len(concrete):
            found.append(concrete[place])
        else:
            found.append(value)
    return found


def _tensor(value: Any) -> Any:
    if not hasattr(value, "sizes"):
        return value
    return TensorArgument(
        tuple(value.sizes), dtype_name(value.dtype), tuple(value.strides), int(value.storage_data_ptr or 0)
    )


def _device_kernels(results: Any, launchers: dict[int, Op]) -> list[DeviceKernel]:
    found = []
    for event in results.events():
        device = str(event.device_type()).rpartition(".")[2].lower()
        if device == "cpu" or event.duration_ns() <= 0 or event.is_user_annotation():
            continue
        found.append(
            DeviceKernel(
                event.name(),
                event.start_ns(),
                event.end_ns(),
                f"{device}:{event.device_index()}",
                event.device_resource_id(),
                launchers.get(event.linked_correlation_id()),
            )
        )
    return found
