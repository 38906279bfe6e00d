"""What calls of a chain are that compute nothing: torch's methods of the same name, and what it has no method for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def contiguous_unless_channels_last(image: Tensor) -> Tensor:
    last = image.stride(1) == 1 and image.is_contiguous(memory_format=FORMATS[image.dim()])
    return image if last else image.contiguous()


def channels_last(image: Tensor) -> Tensor:
    return image if image.stride(1) == 1 else image.contiguous(memory_format=FORMATS[image.dim()])


def padded(input: Tensor, amounts: Sequence[int], value: float) -> Tensor:
    """As torch pads with a constant, but itself where there is nothing to pad."""
    return functional.pad(input, list(amounts), value=value) if any(amounts) else input


def sliced(input: Tensor, dim: int, taken: Sequence[int]) -> Tensor:
    """`input[start:end:step]` along a dimension. The end may lie anywhere behind the last element."""
    return input[(slice(None),) * (dim % input.dim()) + (slice(*taken),)]


def chunked(input: Tensor, dim: int, chunks: int, place: int) -> Tensor:
    """One of the parts that `input.chunk(chunks, dim)` gives."""
    return input.chunk(chunks, dim)[place]


_OWN = {
    function.__name__: function
    for function in (contiguous_unless_channels_last, channels_last, padded, sliced, chunked)
}


def view_of(name: str) -> Callable[..., Tensor] | None:
    """The function that a call of this name is; None: an operator's."""
    if name in _OWN:
        return _OWN[name]
    function: Any = None if hasattr(torch.ops.xopt, name) else getattr(Tensor, name)
    return function  # type: ignore[no-any-return]
