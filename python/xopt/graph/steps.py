"""Steps that only recorded graphs have, and what their nodes' meta tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

KIND = "kind"  # in the meta of a parameter's or buffer's node: its class
MAKES_RESULT = "makes result"  # in that of a step that makes a container of what the forward answers


class Described(NamedTuple):
    """A tensor's dtype and kind of device, and its sizes in the recorded call: only those that come from weights are so
    in all calls."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str


def description_of(example: Any) -> Any:
    """Of a tensor only what it looks like: a graph must not keep the recorded call's memory."""
    if not isinstance(example, torch.Tensor):
        return example
    return Described(example.dtype, tuple(example.shape), example.device.type)


class OtherSizes(Exception):
    """A call whose sizes take another branch than those of the recorded call."""


def expect(function: Callable[..., Any], left: Any, right: Any, outcome: Any) -> None:
    """The step of a recorded graph that ends a call for which the graph does not hold."""
    if function(left, right) != outcome:
        raise OtherSizes


def with_part(tensor: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    """The step of a recorded graph that writes to a part of a blank tensor, which nobody sees as it was."""
    tensor[key] = value
    return tensor


def copied_with_part(tensor: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    """The same where a pattern may have made the tensor one that others see."""
    return with_part(tensor.clone(), key, value)


def call_plainly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)
