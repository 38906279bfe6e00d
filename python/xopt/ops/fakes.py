"""What the fakes of all operators have in common: registration, and the checks that do not depend on values.

A fake tells the shape and dtype of a result, for sizes that may be symbols; what depends on values (the header of a
packed weight, names of activations) is checked when the op is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Tensor = torch.Tensor
Size = int | torch.SymInt
Fake = TypeVar("Fake", bound=Callable[..., object])

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
COPIED = (*FLOATING, torch.int8, torch.uint8, torch.int32)
"""By operators that copy, and compute with nothing."""


def ceil_div(value: Size, divisor: int) -> Size:
    return (value + divisor - 1) // divisor


def empty_image(like: Tensor, channels: Size, spatial: Sequence[Size], dtype: torch.dtype | None = None) -> Tensor:
    """What operators on images return: as many as there are of `like`, with the channels last in memory."""
    return like.new_empty((like.shape[0], *spatial, channels), dtype=dtype or like.dtype).movedim(-1, 1)


def fake_of(op: str) -> Callable[[Fake], Fake]:
    def register(fake: Fake) -> Fake:
        torch.library.register_fake(f"xopt::{op}", fake)
        return fake

    return register


def check(op: str, named: dict[str, Tensor | None], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Check the first tensor's dtype, and that all lie on its device and want no gradient; return the first."""
    first_name, first = next(iter(named.items()))
    assert first is not None
    if first.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise RuntimeError(f"xopt::{op}: {first_name}: expected dtype {expected}, got {first.dtype}")
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.device != first.device:
            raise RuntimeError(f"xopt::{op}: {name}: expected a tensor on {first.device}, got one on {tensor.device}")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(f"xopt::{op}: {name}: requires a gradient, but this op has none")
    return first
