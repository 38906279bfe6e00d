"""What calls of a chain are that compute nothing: torch's methods of the same name, and what it has no method for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def contiguous_unless_channels_last(image: Tensor) -> Tensor:
    last = image.stride(1) == 1 and image.is_contiguous(memory_format=FORMATS[image.dim()])
    return image if last else image.contiguous()


def view_of(name: str) -> Callable[..., Tensor] | None:
    """The function that a call of this name is; None: an operator's."""
    if name == contiguous_unless_channels_last.__name__:
        return contiguous_unless_channels_last
    function: Any = None if hasattr(torch.ops.xopt, name) else getattr(Tensor, name)
    return function  # type: ignore[no-any-return]
