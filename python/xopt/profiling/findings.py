"""What a profile says, in words: what costs most and what would help."""

from __future__ import annotations

from typing import Any

from xopt.profiling.calls import COMPILED_LOOPS
from xopt.profiling.category import ALLOCATION, FALLBACK, OVERHEAD, REORDER
from xopt.profiling.result import Kernel, Profile
from xopt.profiling.work import OTHER_LAYOUT

_WORTH = 0.05  # of the wall time: less is not worth a sentence
_FEW = 3


def findings_of(profile: Profile) -> list[str]:
    wall = sum(category.seconds for category in profile.categories.values())
    if not wall:
        return []
    finders = (
        _error,
        _compiled_before,
        _main_cost,
        _reorders,
        _fallbacks,
        _overhead,
        _allocation,
        _slow_kernels,
        _uneven_threads,
        _idle,
    )
    return [finding for finder in finders for finding in finder(profile, wall)]


def _error(profile: Profile, wall: float) -> list[str]:
    return [f"The profile ends early, with {profile.error}."] if profile.error else []


def _compiled_before(profile: Profile, wall: float) -> list[str]:
    if not any(kernel.name == COMPILED_LOOPS for kernel in profile.kernels):
        return []
    return [
        f"The {COMPILED_LOOPS} are not told apart, because it was compiled before: a profile of torch.compile(model)"
        " from its first call on names them."
    ]


def _share(profile: Profile, category: str, wall: float) -> float:
    found = profile.categories.get(category)
    return found.seconds / wall if found else 0.0


def _where(kernels: list[Kernel]) -> str:
    places = list(dict.fromkeys(f"`{kernel.module}`" for kernel in kernels if kernel.module))
    return ", ".join(places[:_FEW])


def _main_cost(profile: Profile, wall: float) -> list[str]:
    real = {name: one for name, one in profile.categories.items() if name != OVERHEAD}
    if not real:
        return []
    name = max(real, key=lambda category: real[category].seconds)
    top = next(kernel for kernel in profile.kernels if kernel.category == name)
    return [
        f"{real[name].seconds / wall:.0%} of the time is {name}; the most of it `{top.name}`"
        + (f" in `{top.module}`" if top.module else "")
        + f" ({top.seconds / wall:.0%})."
    ]


def _reorders(profile: Profile, wall: float) -> list[str]:
    share = _share(profile, REORDER, wall)
    if share < _WORTH:
        return []
    kernels = [kernel for kernel in profile.kernels if kernel.category == REORDER]
    casts = sum(kernel.seconds for kernel in kernels if " to " in kernel.name)
    total = sum(kernel.seconds for kernel in kernels)
    layouts = sum(kernel.seconds for kernel in kernels if OTHER_LAYOUT in kernel.name)
    if layouts > total / 2:
        what, advice = "layout changes", "; channels_last would remove them" if _has_images(kernels) else ""
    elif casts > total / 2:
        what, advice = "changes of dtype", "; one dtype throughout (autocast, xopt.optimize with dtype=) removes most"
    else:
        what, advice = "copies", ""
    where = _where(kernels)
    return [f"{share:.0%} of the time is {what}{' around ' + where if where else ''}{advice}."]


def _has_images(kernels: list[Kernel]) -> bool:
    return any(len(tensor["shape"]) == 4 for kernel in kernels for tensor in _tensors(kernel))


def _tensors(kernel: Kernel) -> list[dict[str, Any]]:
    return [value for value in kernel.arguments.values() if isinstance(value, dict) and "shape" in value]


def _fallbacks(profile: Profile, wall: float) -> list[str]:
    share = _share(profile, FALLBACK, wall)
    if share < _WORTH / 5:
        return []
    kernels = [kernel for kernel in profile.kernels if kernel.category == FALLBACK]
    names = ", ".join(dict.fromkeys(f"`{kernel.operator}`" for kernel in kernels[:_FEW]))
    where = _where(kernels)
    return [
        f"{share:.0%} of the time goes into torch's own kernels for work that xopt has kernels for: {names}"
        + (f" in {where}" if where else "")
        + ". xopt.report(model) says why they were left."
    ]


def _overhead(profile: Profile, wall: float) -> list[str]:
    share = _share(profile, OVERHEAD, wall)
    if share < 2 * _WORTH:
        return []
    small = sum(kernel.calls for kernel in profile.kernels if kernel.bound == "overhead") / max(profile.steps, 1)
    calls = f"{small:.0f} calls a step are so small that calling them costs more than they do; " if small >= 1 else ""
    return [
        f"{share:.0%} of the time is spent between kernels, in Python and torch's dispatcher; {calls}larger batches"
        " spread it over more work."
    ]


def _allocation(profile: Profile, wall: float) -> list[str]:
    faults = profile.memory.page_faults
    share = _share(profile, ALLOCATION, wall)
    if faults < 1000 and share < _WORTH:
        return []
    allocated = profile.memory.allocated_bytes
    what = "" if allocated is None else f" allocates {allocated / 2**20:.0f} MB and"
    return [
        f"A step{what} takes {faults:.0f} page faults; xopt.runtime.memory_pool keeps freed memory for the next step."
    ]


def _slow_kernels(profile: Profile, wall: float) -> list[str]:
    """Large ones that are far from what the machine allows."""
    slow = [
        kernel
        for kernel in profile.kernels
        if kernel.share_of_roof is not None
        and kernel.share_of_roof < 0.3
        and kernel.bound in ("compute", "memory")
        and kernel.seconds / wall > _WORTH
    ]
    return [
        f"`{kernel.name}` takes {kernel.seconds / wall:.0%} of the time and reaches {kernel.share_of_roof:.0%} of what"
        f" this machine's {'arithmetic' if kernel.bound == 'compute' else 'memory'} allows."
        for kernel in slow[:_FEW]
    ]


def _uneven_threads(profile: Profile, wall: float) -> list[str]:
    efficiency = profile.thread_efficiency
    if efficiency is None or efficiency > 0.8 or profile.threads < 2:
        return []
    return [
        f"The threads of xopt's parallel regions work {efficiency:.0%} of their time and wait for the rest: cores are"
        " shared with other work, or the work does not divide evenly."
    ]


def _idle(profile: Profile, wall: float) -> list[str]:
    if profile.overhead is None or profile.overhead < 0.1:
        return []
    return [
        f"Steps took {profile.overhead:.0%} longer with the profiler on: by its own work, which makes small kernels"
        " look larger than they are, or by other work on this machine."
    ]
