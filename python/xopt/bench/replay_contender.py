"""What a contender of a replay is, and which instances of xopt's kernels there are for a recorded call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import xopt
from xopt import _C

RECORDED = "what ran"


@dataclass(frozen=True)
class Contender:
    name: str
    make: Callable[[], Any]
    """Operands with memory of their own."""
    run: Callable[[Any], Any]
    level: str | None = None
    """The highest that kernels are chosen from; None: as the process has it."""
    same_result: bool = True
    """Whether it computes all that was recorded, and not only its main work."""
    choice: tuple[int, ...] | None = None
    """What of a product or convolution is chosen otherwise than by heuristics; None: nothing."""


def levels_of(kernel: dict[str, Any]) -> list[str]:
    """The levels up to this CPU's that have an instance of a kernel of ours."""
    name = _kernel_of(kernel)
    return instance_levels(name, kernel["dtype"]) if name is not None else []


def _kernel_of(kernel: dict[str, Any]) -> str | None:
    """The name in the registry of what an operator of ours runs."""
    cost = xopt.ops.costs.COSTS.get(kernel["operator"].removeprefix("xopt::"))
    return cost.kernel if cost is not None else None


def _registered_dtype(dtype: str) -> str:
    """Of a kernel whose input has this dtype."""
    return {"s8": "s8s8", "u8": "u8s8"}.get(dtype, dtype)


def instance_levels(kernel: str, dtype: str) -> list[str]:
    usable = xopt.capabilities().levels
    records = [record for record in xopt.kernels() if record.name == kernel and record.isa in usable]
    wanted = _registered_dtype(dtype)
    if not any(record.dtype == wanted for record in records):
        wanted = "f32"  # kernels that compute in fp32 whatever the dtype
    return [record.isa for record in records if record.dtype == wanted]


def ours_at_levels(name: str, kernel: str, dtype: str, all_instances: bool) -> Iterator[tuple[str, str | None]]:
    """Names and levels of contenders for work that torch did."""
    yield name, None
    if all_instances:
        yield from ((f"{name}, {level}", level) for level in instance_levels(kernel, dtype))


def blockings_of(kernel: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """What autotuning would try beside levels, where it has a say in the kernel."""
    name, dtype = _kernel_of(kernel), _registered_dtype(kernel["dtype"])
    if name not in ("gemm", "conv") or kernel["operator"] == "xopt::recurrent":
        return []
    if dtype not in {record.dtype for record in xopt.kernels() if record.name == name}:
        return []
    found = _C.tuning_candidates(name, dtype, torch.get_num_threads())
    return [(instance, tuple(choice)) for instance, choice in found if choice[0] < 0]
