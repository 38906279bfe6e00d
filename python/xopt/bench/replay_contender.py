"""What a contender of a replay is, and which instances of xopt's kernels there are for a recorded call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import xopt
from xopt import _C
from xopt.bench.peers import find_op

RECORDED = "what ran"
_TUNABLE = ("gemm", "conv", "conv_depthwise", "attention")
_NOT_TUNED = ("xopt::recurrent",)
"""Operators that call these kernels in pieces of their own choice."""

ONEDNN_ACTIVATIONS = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "gelu_erf": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "sigmoid": ("sigmoid", ""),
    "tanh": ("tanh", ""),
}
"""oneDNN's names for activations in torch: the name, and the kind."""


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
    """What of the kernel is chosen otherwise than by heuristics; None: nothing."""


def levels_of(kernel: dict[str, Any]) -> list[str]:
    """The levels up to this CPU's that have an instance of a kernel of ours."""
    name = _kernel_of(kernel)
    return instance_levels(name, kernel["dtype"]) if name is not None else []


def _kernel_of(kernel: dict[str, Any]) -> str | None:
    """The name in the registry of what an operator of ours runs."""
    cost = xopt.ops.costs.COSTS.get(kernel["operator"].removeprefix("xopt::"))
    if cost is None or not kernel["arguments"]:
        return None
    schema = find_op(f"{kernel['operator'].replace('::', '.')}.default")._schema.arguments
    given = {one.name: _shape_of(kernel["arguments"][one.name]) for one in schema if one.name in kernel["arguments"]}
    named = {one.name: given.pop(one.name) for one in schema if one.kwarg_only and one.name in given}
    return cost.work(*given.values(), **named).kernel or cost.kernel


def _shape_of(value: Any) -> Any:
    """As the operators' formulas take it."""
    if isinstance(value, list):
        return [_shape_of(item) for item in value]
    return value["shape"] if isinstance(value, dict) and "shape" in value else value


def _registered_dtype(kernel: str, dtype: str) -> str:
    """Of a kernel whose input has this dtype."""
    found = {"s8": "s8s8", "u8": "u8s8"}.get(dtype, dtype)
    # Some compute in fp32 whatever the dtype.
    return found if any((record.name, record.dtype) == (kernel, found) for record in xopt.kernels()) else "f32"


def instance_levels(kernel: str, dtype: str) -> list[str]:
    usable, wanted = xopt.capabilities().levels, (kernel, _registered_dtype(kernel, dtype))
    return [record.isa for record in xopt.kernels() if (record.name, record.dtype) == wanted and record.isa in usable]


def ours_at_levels(name: str, kernel: str, dtype: str, all_instances: bool) -> Iterator[tuple[str, str | None]]:
    """Names and levels of contenders for work that torch did."""
    yield name, None
    if all_instances:
        yield from ((f"{name}, {level}", level) for level in instance_levels(kernel, dtype))


def blockings_of(kernel: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """What autotuning would try beside levels, where it has a say in the kernel."""
    name = _kernel_of(kernel)
    if name not in _TUNABLE or kernel["operator"] in _NOT_TUNED:
        return []
    found = _C.tuning_candidates(name, _registered_dtype(name, kernel["dtype"]), torch.get_num_threads())
    return [(instance, tuple(choice)) for instance, choice in found if choice[0] < 0]
