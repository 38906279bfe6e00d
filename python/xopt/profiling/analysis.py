"""Makes a profile of what was recorded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from xopt.profiling.calls import Call, add_trace, calls_and_pieces
from xopt.profiling.category import (
    ALLOCATION,
    FALLBACK,
    OVERHEAD,
    TAKEN_BY_XOPT,
    find_operator,
)
from xopt.profiling.events import Events, Op, TensorArgument, dtype_name
from xopt.profiling.result import Category, Kernel, Module, Profile
from xopt.profiling.timeline import Piece, clipped, covered, deal_out
from xopt.profiling.work import Work, bound_arguments, tensors_in, work_of
from xopt.roofs import Roofs

PYTHON = "Python"
SMALL_SECONDS = 5e-6  # a kernel whose work would take less is bound by what it takes to call it
MOST_OF_A_ROOF = 1.05
MOST_PIECES = 60_000
_TAKEN_DTYPES = ("f32", "bf16", "f16")


@dataclass
class Recording:
    """What `collect` hands over."""

    events: Events
    trace: list[tuple[int, int, int, int, int, str]]
    module_kinds: dict[str, str]
    """The class of each module that is known, by its path."""
    weights: dict[int, str]
    """The module that owns the memory at an address."""
    optimized: bool
    """Whether the model is one that xopt has optimized."""


@dataclass
class _Group:
    """Calls of one row of the table."""

    calls: list[Call] = field(default_factory=list)
    seconds: float = 0.0
    own_seconds: float = 0.0
    work: Work | None = None


def analyse(recording: Recording, profile: Profile, roofs: Roofs | None) -> None:
    """Fills in what follows from the recording; steps' times, the machine and the roofs' figures are the caller's."""
    events = recording.events
    calls, pieces = calls_and_pieces(events.roots)
    add_trace(calls, recording.trace)
    shares, idle = deal_out(pieces, events.steps)
    python = Call(PYTHON, OVERHEAD, None)
    shares[id(python)] = idle
    calls.append(python)
    inside = list(clipped(pieces, events.steps))
    own: dict[int, float] = {id(python): idle}
    for _, piece in inside:
        own[id(piece.owner)] = own.get(id(piece.owner), 0.0) + piece.end - piece.start
    calls = [call for call in calls if id(call) in own]
    for call in calls:
        _refine(call, recording)
    names = _add_kernels(profile, calls, shares, own, roofs)
    busy = ((piece.start, piece.end) for _, piece in inside if piece.owner.category not in (OVERHEAD, ALLOCATION))
    profile.kernel_seconds = covered(busy) / 1e9
    _add_modules(profile, calls, shares, recording.module_kinds)
    profile.timeline = _timeline(inside, events.steps, names)


def _refine(call: Call, recording: Recording) -> None:
    """Says whose weight it is that a fused block's kernel works on, and what xopt could have taken."""
    op = call.op
    if op is None:
        return
    for tensor in tensors_in(op.arguments)[1:]:
        owner = recording.weights.get(tensor.pointer)
        if owner is not None:
            call.module = owner
            break
    if recording.optimized and call.category in TAKEN_BY_XOPT and not op.name.startswith("xopt::"):
        first = next((tensor.dtype for tensor in tensors_in(op.arguments)), "")
        if first in _TAKEN_DTYPES:
            call.category = FALLBACK


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _add_kernels(
    profile: Profile, calls: list[Call], shares: dict[int, float], own: dict[int, float], roofs: Roofs | None
) -> dict[int, str]:
    """Fills in kernels and categories; the name of each call by its id."""
    groups: dict[tuple[str, str, str | None], _Group] = {}
    works: dict[Any, Work] = {}
    names: dict[int, str] = {}
    for call in calls:
        work = None
        if call.op is not None:
            called_with = repr(call.op.arguments), tuple(call.names), call.instance
            key = call.op.name, call.op.overload, call.category, *called_with
            work = works.get(key) or works.setdefault(key, work_of(call))
        names[id(call)] = work.name if work else call.name
        module = None if call.module is None else re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", call.module)
        if call.op is None:
            module = None
        group = groups.setdefault((names[id(call)], call.category, module), _Group(work=work))
        group.calls.append(call)
        group.seconds += shares.get(id(call), 0.0) / 1e9
        group.own_seconds += own[id(call)] / 1e9
    for (name, category, module), group in groups.items():
        profile.kernels.append(_kernel(name, category, module, group, roofs))
        entry = profile.categories.setdefault(category, Category())
        entry.seconds += group.seconds
        entry.calls += sum(call.op is not None for call in group.calls)
    profile.kernels.sort(key=lambda kernel: -kernel.seconds)
    return names


def _kernel(name: str, category: str, module: str | None, group: _Group, roofs: Roofs | None) -> Kernel:
    op, work = group.calls[0].op, group.work
    kernel = Kernel(
        name=name,
        category=category,
        module=module,
        calls=len(group.calls),
        seconds=group.seconds,
        own_seconds=group.own_seconds,
        flop=work.flop if work else 0,
        bytes=work.bytes if work else 0,
        dtype=work.dtype if work else "",
        operator=op.name if op else "",
        overload=op.overload if op else "",
        arguments=named_arguments(op, group.calls[0].names) if op else {},
    )
    regions = [region for call in group.calls for region in call.regions]
    spent = sum((region.end - region.start) * region.threads for region in regions)
    if spent:
        kernel.thread_efficiency = min(1.0, sum(region.busy for region in regions) / spent)
    if roofs is not None and category not in (OVERHEAD, ALLOCATION):
        compare(kernel, roofs)
    return kernel


def compare(kernel: Kernel, roofs: Roofs) -> None:
    """Says what of the roofs a kernel reaches, and what bounds it."""
    if not kernel.bytes or not kernel.own_seconds:
        return
    computing = kernel.flop / peak_of(roofs, kernel.dtype)
    moving = kernel.bytes / roofs.read
    kernel.share_of_roof = max(computing, moving) / kernel.seconds_per_call
    kernel.bound = "compute" if computing > moving else "memory"
    if max(computing, moving) < SMALL_SECONDS and kernel.share_of_roof < 0.5:
        kernel.bound = "overhead"


def beats_roof(kernel: Kernel) -> bool:
    """Whether it computed faster than the machine can. (Bytes may well come faster than from memory.)"""
    return kernel.bound == "compute" and (kernel.share_of_roof or 0.0) > MOST_OF_A_ROOF


def peak_of(roofs: Roofs, dtype: str) -> float:
    """Operations a second. What has no roof of its own is computed in fp32, as fp16 is on most levels of CPUs."""
    kind = "int8" if dtype in ("s8", "u8") else dtype
    return roofs.peak(kind if kind in roofs.by_kind else "f32")


def named_arguments(op: Op, names: list[str]) -> dict[str, Any]:
    bound, operator = bound_arguments(op, tuple(names), lambda tensor: tensor), find_operator(op.name, op.overload)
    if bound is None:
        return {}
    args, kwargs = bound
    by_name = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
    return {name: _plain(value) for name, value in by_name.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, TensorArgument):
        return {"shape": list(value.shape), "dtype": value.dtype, "strides": list(value.strides)}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else None


# ---- Modules, timeline -----------------------------------------------------------------------------------------------


def _add_modules(profile: Profile, calls: list[Call], shares: dict[int, float], kinds: dict[str, str]) -> None:
    for call in calls:
        if call.module is None:
            continue
        module = profile.modules.setdefault(call.module, Module(kinds.get(call.module, "")))
        module.seconds += shares.get(id(call), 0.0) / 1e9
        module.calls += call.op is not None
    for path in list(profile.modules):  # with those around them, so that the tree has no holes
        while path:
            path = path.rpartition(".")[0]
            profile.modules.setdefault(path, Module(kinds.get(path, "")))


def _timeline(
    inside: list[tuple[int, Piece[Call]]], steps: list[tuple[int, int]], names: dict[int, str]
) -> list[list[Any]]:
    rows = []
    for step, piece in inside[:MOST_PIECES]:
        start, duration = (piece.start - steps[step][0]) / 1e3, (piece.end - piece.start) / 1e3
        name = names.get(id(piece.owner), piece.owner.name)
        rows.append([step, round(start, 3), round(duration, 3), piece.thread, name, piece.owner.category])
    return rows
