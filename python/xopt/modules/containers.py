"""The containers that models answer in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    """The result with its tensors changed: those in dicts, tuples and lists too. Whatever else a model returns (a
    key-value cache) stays as it is."""
    if isinstance(result, torch.Tensor):
        return change(result)
    if isinstance(result, dict):  # transformers' outputs too: writing an item sets the attribute as well
        for key, value in list(result.items()):
            changed = map_tensors(change, value)
            made_anew = isinstance(value, (tuple, list))  # which torch.compile cannot compare by identity
            if made_anew or (isinstance(value, torch.Tensor) and changed is not value):
                result[key] = changed
        return result
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(map_tensors(change, item) for item in result))
    if type(result) in (tuple, list):
        return type(result)(map_tensors(change, item) for item in result)
    return result
