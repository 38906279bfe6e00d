"""`profile` and `profiler`: take a profile, and leave nothing behind."""

from __future__ import annotations

import resource
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

import xopt
from xopt import _C
from xopt.profiling.analysis import Recording, analyse, beats_roof, compare
from xopt.profiling.device_roofs import name_of_device, roofs_of_device
from xopt.profiling.devices import compare_with_roofs, devices_of
from xopt.profiling.events import read_events
from xopt.profiling.findings import findings_of
from xopt.profiling.module_marks import STEP, ModuleMarks, mark
from xopt.profiling.result import Profile
from xopt.profiling.roof_cache import raised_roofs, roofs_of_machine
from xopt.roofs import Roofs

STEPS = 10
WARMUP = 3


def profile(
    model: Any, *inputs: Any, steps: int = STEPS, warmup: int = WARMUP, roofs: bool = True, **named: Any
) -> Profile:
    """Runs `model(*inputs, **named)` and says where the time goes.

    `warmup` calls go first; then `steps` calls are timed without the profiler and `steps` with it, both under
    torch.inference_mode. `roofs=False` leaves out the comparison with the machine's limits, which are measured at the
    first uses on a machine (some seconds).
    """
    if not callable(model):
        raise TypeError(f"profile: model: expected a module or a function, got a {type(model).__name__}")
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"profile: {name}: expected a whole number of at least {least}, got {value!r}")
    with torch.inference_mode(), kernels_named():
        for _ in range(warmup):
            model(*inputs, **named)
        plain = [_timed(model, inputs, named) for _ in range((steps + 1) // 2)]
        session = Session(model if isinstance(model, nn.Module) else None, roofs=roofs, one_step=False)
        if warmup:
            session.warm_up(model, inputs, named)
        with session as taken:
            for _ in range(steps):
                with session.step(), _hooks_welcome():
                    model(*inputs, **named)
        # Half of them afterwards: a machine that is shared changes its pace.
        plain += [_timed(model, inputs, named) for _ in range((steps + 1) // 2)]
        taken.memory.allocations, taken.memory.allocated_bytes = _allocations(model, inputs, named)
    taken.plain_step_seconds = plain
    taken.findings = findings_of(taken)
    return taken


def profiler(model: nn.Module | None = None, *, roofs: bool = True) -> Session:
    """`with xopt.profiler() as prof:` profiles a block as one step; `prof` is filled in when it ends.

    `model` is the module whose submodules are named without a prefix; without it, modules called from outside all
    others are found, and named after their class. An exception passes through, and what was seen so far is kept.
    """
    return Session(model, roofs=roofs)


def _timed(model: Any, inputs: Any, named: Any) -> float:
    start = time.perf_counter()
    model(*inputs, **named)
    _synchronize()
    return time.perf_counter() - start


@contextmanager
def _hooks_welcome() -> Iterator[None]:
    """No word of torch.compile's about hooks of all modules: our marks are made in forwards only, and so may fire once
    more for a compiled module."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        yield


def _allocations(model: Any, inputs: Any, named: Any) -> tuple[int, int]:
    """How many tensors' memories one step allocates in this thread, and their bytes."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model(*inputs, **named)
    sizes = [event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sum(size > 0 for size in sizes), sum(size for size in sizes if size > 0)


def _synchronize() -> None:
    for device in _devices():
        device.synchronize()


def _devices() -> list[Any]:
    """torch's modules of the devices that are there beside the CPU, and started."""
    found = [getattr(torch, name, None) for name in ("cuda", "xpu")]
    return [device for device in found if device is not None and device.is_available() and device.is_initialized()]


def _devices_in_use() -> list[Any]:
    """Of these, where something lies: the profiler itself starts a device."""
    return [device for device in _devices() if device.memory_allocated() > 0]


@contextmanager
def kernels_named() -> Iterator[None]:
    """Graphs that TorchInductor compiles meanwhile tell the profiler of each of their kernels."""
    try:
        from torch._inductor import config
    except ImportError:
        yield
        return
    with config.patch({"cpp.enable_kernel_profile": True}):
        yield


_taking = threading.Lock()
_measured_again: set[int] = set()  # for which numbers of threads


@contextmanager
def _alone() -> Iterator[None]:
    """Torch's profiler loses what it has recorded where a second one starts."""
    problem = "profiler: expected no other profile to be taken meanwhile, by xopt or by torch.profiler"
    if not _taking.acquire(blocking=False):
        raise RuntimeError(problem)
    try:
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError(problem)
        yield
    finally:
        _taking.release()


class Session(AbstractContextManager[Profile]):
    """One profile being taken. Only one can be at a time in a process: torch's profiler allows no more."""

    def __init__(self, model: nn.Module | None = None, *, roofs: bool = True, one_step: bool = True) -> None:
        self.profile = Profile(title=type(model).__name__ if model is not None else "")
        self._wants_roofs = roofs
        self._one_step = one_step
        self._marks = ModuleMarks(model)
        self._kineto: Any = None
        self._cleanup = ExitStack()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)

    def warm_up(self, model: Any, inputs: Any, named: Any) -> None:
        """One call with the marks, which then stay for the profile: a compiled module may be compiled anew for them,
        and would be once more for others."""
        self._marks.install()
        try:
            with _hooks_welcome():
                model(*inputs, **named)
        except BaseException:
            self._marks.remove()
            raise

    def __enter__(self) -> Profile:
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU}
        self._kineto = torch.profiler.profile(
            activities=sorted(wanted & _supported_activities(), key=str),
            record_shapes=True,
            # Of all threads torch does not record what TorchInductor's kernels were called with, which is how sizes of
            # a device's kernels are known.
            experimental_config=torch._C._profiler._ExperimentalConfig(
                profile_all_threads=not _devices_in_use(), capture_overload_names=True
            ),
        )
        with ExitStack() as started:
            self._marks.install()
            started.callback(self._marks.remove)
            started.enter_context(_alone())
            started.enter_context(kernels_named())
            self._kineto.__enter__()
            started.callback(self._kineto.__exit__, None, None, None)
            _C.start_trace()
            started.callback(_C.stop_trace)
            self._usage = resource.getrusage(resource.RUSAGE_SELF)
            if self._one_step:
                started.enter_context(self.step())
            self._cleanup = started.pop_all()
        return self.profile

    @contextmanager
    def step(self) -> Iterator[None]:
        """Marks a step of what is profiled; its time is the mark's, so that what is found within adds up to it."""
        with mark(STEP):
            try:
                yield
            finally:
                _synchronize()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after = resource.getrusage(resource.RUSAGE_SELF)
        self._cleanup.close()
        taken = self.profile
        if error is not None:
            taken.error = f"{type(error).__name__}: {error}"
        recording = self._recording()
        taken.step_seconds = [(end - start) / 1e9 for start, end in recording.events.steps]
        taken.steps = len(taken.step_seconds)
        taken.threads = torch.get_num_threads()
        taken.memory.page_faults = (after.ru_minflt - self._usage.ru_minflt) / max(taken.steps, 1)
        taken.memory.major_page_faults = (after.ru_majflt - self._usage.ru_majflt) / max(taken.steps, 1)
        taken.machine = _machine()
        roofs = roofs_of_machine(taken.threads) if self._wants_roofs else None
        if not taken.title:
            taken.title = self._marks.title()
        analyse(recording, taken, roofs)
        if roofs is not None:
            self._compare_again(taken, roofs)
        self._add_devices(recording)
        if _C.trace_dropped():
            taken.notes.append(f"{_C.trace_dropped()} notes of xopt's kernels were lost: profile fewer steps.")
        taken.findings = findings_of(taken)

    def _compare_again(self, taken: Profile, roofs: Roofs) -> None:
        """Notes the roofs; higher ones, if a kernel has computed faster than they say that the machine can: a neighbour
        was busy when they were measured. Once in a process, as kernels may also compute less than is counted."""
        if taken.threads not in _measured_again and any(map(beats_roof, taken.kernels)):
            _measured_again.add(taken.threads)
            roofs = raised_roofs(taken.threads, roofs)
            for kernel in taken.kernels:
                if kernel.share_of_roof is not None:
                    compare(kernel, roofs)
        taken.roofs = {kind: roof.per_second for kind, roof in roofs.by_kind.items()}

    def _add_devices(self, recording: Recording) -> None:
        self.profile.devices = devices_of(recording.events.device, recording.events.roots)
        for name, device in self.profile.devices.items():
            device.name = name_of_device(name)
            if self._wants_roofs:
                roofs = roofs_of_device(name)
                device.roofs = {kind: roof.per_second for kind, roof in roofs.by_kind.items() if kind != "read"}
                compare_with_roofs(device, roofs)

    def _recording(self) -> Recording:
        modules = self._marks.modules()
        weights: dict[int, str] = {}
        for path, module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    weights.setdefault(_address(parameter), path)
        weights.pop(0, None)
        kinds = {path: type(module).__name__ for path, module in modules}
        events = read_events(self._kineto.profiler.kineto_results)
        return Recording(events, _C.trace_entries(), kinds, weights, any(map(xopt.is_optimized, self._marks.roots())))


def _supported_activities() -> set[ProfilerActivity]:
    return set(torch.profiler.supported_activities())  # type: ignore[no-untyped-call]


def _machine() -> dict[str, Any]:
    found = xopt.capabilities()
    return {
        "cpu": found.cpu,
        "level": found.level,
        "torch": found.torch_version,
        "xopt": found.xopt_version,
        "cpus": len(found.affinity),
    }


def _address(parameter: torch.Tensor) -> int:
    """Where its memory begins, which for a packed weight is that of the packed values; 0 where it has none."""
    held = getattr(parameter, "packed", parameter)
    try:
        return int(held.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
