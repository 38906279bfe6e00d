"""The fake of combine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of

HOW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}


@fake_of("combine")
def _combine(first: Tensor, second: Tensor, how: str, relu: bool = False) -> Tensor:
    check("combine", {"first": first, "second": second}, FLOATING)
    if how not in HOW:
        raise RuntimeError(f"xopt::combine: how: expected one of {', '.join(HOW)}, got '{how}'")
    return HOW[how](first, second)


@cost_of("combine", category="pointwise", kernel="combine")
def _combine_work(first: Shape, second: Shape, how: str, relu: bool = False) -> Work:
    return Work(f"{joined(first)} and {joined(second)}")
