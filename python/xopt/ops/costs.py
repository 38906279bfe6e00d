"""What the operators cost, for `torch.utils.flop_counter` and for the profiler. Each file here says it of its own.

A formula takes the op's own arguments, with a shape in the place of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]


@dataclass(frozen=True)
class Work:
    size: str
    """The problem's size as it is usually written: "128x3072x768" is [128, 768] times [768, 3072]."""
    flop: int = 0
    """Of products alone, as flop_counter counts; a multiply-add is two."""
    kernel: str = ""
    """The name in `xopt.kernels()`, where it is not the op's usual one."""
    itemsizes: tuple[int, ...] = ()
    """Of what is multiplied, where that need not be the input's dtype: the sizes that a packed weight tells of."""


@dataclass(frozen=True)
class Cost:
    category: str
    """Of the profiler's categories."""
    kernel: str
    """The name in `xopt.kernels()`."""
    work: Callable[..., Work]


COSTS: dict[str, Cost] = {}
"""By the op's name without its namespace."""

Formula = TypeVar("Formula", bound=Callable[..., Work])


def cost_of(op: str, *, category: str, kernel: str) -> Callable[[Formula], Formula]:
    def register(formula: Formula) -> Formula:
        COSTS[op] = Cost(category, kernel, formula)

        @register_flop_formula(getattr(torch.ops.xopt, op))
        def count(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
            return formula(*args, **kwargs).flop

        return formula

    return register


def product(rows: int, columns: int, terms: int, *, count: int = 1, itemsizes: tuple[int, ...] = ()) -> Work:
    """`count` matrices [rows, terms] times [terms, columns]."""
    return Work(f"{rows}x{columns}x{terms}", 2 * count * rows * columns * terms, itemsizes=itemsizes)


def rows_of(shape: Shape) -> int:
    return math.prod(shape[:-1])


def joined(shape: Shape) -> str:
    return "x".join(map(str, shape))
