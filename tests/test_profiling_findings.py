"""What a profile says in words, and what two say of each other: profiles that are made up, each with one cause."""

from __future__ import annotations

from typing import Any

import pytest

from xopt.profiling import Profile
from xopt.profiling.calls import COMPILED_LOOPS
from xopt.profiling.difference import changes, text_of_difference
from xopt.profiling.findings import findings_of
from xopt.profiling.result import Category, Kernel, Memory


def kernel(name: str, category: str, seconds: float, **others: Any) -> Kernel:
    fields: dict[str, Any] = {"module": "layer.3.conv2", "calls": 4, "flop": 0, "bytes": 0, "dtype": "f32"}
    fields |= {"operator": f"aten::{name}", "overload": "", "arguments": {}, "own_seconds": seconds} | others
    return Kernel(name=name, category=category, seconds=seconds, **fields)


def made_of(*kernels: Kernel, **others: Any) -> Profile:
    made = Profile(title="made up", steps=2, threads=2, kernels=sorted(kernels, key=lambda one: -one.seconds))
    for one in kernels:
        entry = made.categories.setdefault(one.category, Category())
        entry.seconds += one.seconds
        entry.calls += one.calls
    made.step_seconds = [sum(one.seconds for one in kernels) / 2] * 2
    for name, value in others.items():
        setattr(made, name, value)
    return made


PRODUCT = kernel("linear[f32,avx512] 8x8x8", "gemm", 6.0, operator="xopt::linear")
IMAGE = {"self": {"shape": [1, 8, 4, 4], "dtype": "f32", "strides": [128, 1, 32, 8]}}
ROWS = {"self": {"shape": [1, 8], "dtype": "f32", "strides": [8, 1]}}

FOUND: dict[str, tuple[Profile, str]] = {
    "main cost": (
        made_of(PRODUCT, kernel("relu", "pointwise", 4.0)),
        "60% of the time is gemm; the most of it `linear[f32,avx512] 8x8x8` in `layer.3.conv2` (60%).",
    ),
    "layout changes of images": (
        made_of(PRODUCT, kernel("copy_[f32] 1x8x4x4, other layout", "reorder", 4.0, arguments=IMAGE)),
        "40% of the time is layout changes around `layer.3.conv2`; channels_last would remove them.",
    ),
    "layout changes of rows": (
        made_of(PRODUCT, kernel("copy_[f32] 1x8, other layout", "reorder", 4.0, arguments=ROWS)),
        "40% of the time is layout changes around `layer.3.conv2`.",
    ),
    "changes of dtype": (
        made_of(PRODUCT, kernel("_to_copy[f32 to bf16] 1x8", "reorder", 4.0)),
        "40% of the time is changes of dtype around `layer.3.conv2`; one dtype throughout",
    ),
    "copies": (
        made_of(PRODUCT, kernel("cat[f32] 1x8", "reorder", 4.0)),
        "40% of the time is copies around `layer.3.conv2`.",
    ),
    "fallback": (
        made_of(PRODUCT, kernel("addmm", "fallback", 4.0)),
        "40% of the time goes into torch's own kernels for work that xopt has kernels for: `aten::addmm` in",
    ),
    "overhead": (
        made_of(PRODUCT, kernel("Python", "framework overhead", 4.0)),
        "40% of the time is spent between kernels, in Python and torch's dispatcher; larger batches spread",
    ),
    "overhead of small calls": (
        made_of(kernel("relu", "pointwise", 6.0, bound="overhead"), kernel("Python", "framework overhead", 4.0)),
        "dispatcher; 2 calls a step are so small that calling them costs more than they do; larger batches",
    ),
    "page faults": (
        made_of(PRODUCT, memory=Memory(page_faults=5000, allocations=3, allocated_bytes=20 << 20)),
        "A step allocates 20 MB and takes 5000 page faults; xopt.runtime.memory_pool keeps",
    ),
    "far from the roof": (
        made_of(kernel("gemm", "gemm", 6.0, share_of_roof=0.1, bound="compute")),
        "`gemm` takes 100% of the time and reaches 10% of what this machine's arithmetic allows.",
    ),
    "far from the memory's roof": (
        made_of(kernel("relu", "pointwise", 6.0, share_of_roof=0.2, bound="memory")),
        "`relu` takes 100% of the time and reaches 20% of what this machine's memory allows.",
    ),
    "threads": (
        made_of(kernel("gemm", "gemm", 6.0, thread_efficiency=0.5)),
        "The threads of xopt's parallel regions work 50% of their time and wait for the rest",
    ),
    "the profiler's own work": (
        made_of(PRODUCT, plain_step_seconds=[2.0, 2.0]),
        "Steps took 50% longer with the profiler on",
    ),
    "compiled before": (
        made_of(kernel(COMPILED_LOOPS, "pointwise", 6.0)),
        f"The {COMPILED_LOOPS} are not told apart",
    ),
    "an error": (made_of(PRODUCT, error="ValueError: no"), "The profile ends early, with ValueError: no."),
}


@pytest.mark.parametrize("cause", FOUND)
def test_a_cause_is_found_and_said(cause: str) -> None:
    profile, words = FOUND[cause]
    assert any(words in finding for finding in findings_of(profile)), findings_of(profile)
    profile.findings = findings_of(profile)
    assert words in " ".join(str(profile).split())  # the text has it as well


def test_what_is_not_there_is_not_said() -> None:
    profile = made_of(PRODUCT, kernel("cat[f32] 1x8", "reorder", 0.01), kernel("addmm", "fallback", 0.001))
    (only,) = findings_of(profile)
    assert only.startswith("100% of the time is gemm")
    assert findings_of(Profile()) == []


# ---- Two profiles ----------------------------------------------------------------------------------------------------


def test_changes_are_in_the_order_of_what_they_cost() -> None:
    before, after = {"a": 1.0, "b": 4.0, "c": 2.0, "gone": 0.5}, {"a": 1.5, "b": 1.0, "c": 4.0, "new": 0.25}
    found = changes(before, after)
    assert [change.name for change in found] == ["b", "c", "a", "gone", "new"]
    assert [change.ratio() for change in found] == ["x0.25", "x2.00", "x1.50", "gone", "new"]
    assert [change.seconds for change in found] == [-3.0, 2.0, 0.5, -0.5, 0.25]


def test_the_difference_names_slower_and_faster_kernels_and_other_settings() -> None:
    before = made_of(PRODUCT, kernel("relu", "pointwise", 4.0), machine={"level": "avx512"})
    after = made_of(
        kernel(PRODUCT.name, "gemm", 3.0), kernel("relu", "pointwise", 8.0), machine={"level": "avx2"}, threads=1
    )
    text = text_of_difference(before, after)
    assert "a step: 5 s before, 5.5 s after (x1.10)" in text
    assert "- not the same: threads: 2, then 1" in text
    assert "- not the same: level: avx512, then avx2" in text
    slower, faster = text.partition("Slower kernels")[2].split("Faster kernels")
    assert "relu in layer.3.conv2" in slower
    assert "x2.00" in slower
    assert "linear[f32,avx512] 8x8x8 in layer.3.conv2" in faster
    assert "relu" not in faster
    categories = text.partition("Slower kernels")[0]
    assert categories.index("pointwise") < categories.index("gemm")
