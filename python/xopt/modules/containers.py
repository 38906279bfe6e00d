"""The containers that models answer in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    """The result with its tensors changed: those in dicts, tuples, lists, sets and dataclasses too. Whatever else a
    model returns (a key-value cache) stays as it is."""
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
    if dataclasses.is_dataclass(result) and not isinstance(result, (type, torch.nn.Module)):
        return _of_dataclass(change, result)
    if type(result) in (tuple, list, set, frozenset):
        return type(result)(map_tensors(change, item) for item in result)
    return result


def _of_dataclass(change: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    """A copy, where a field changes: a model may keep what it returns, with the tensors that it goes on with."""
    fields = {field.name: getattr(result, field.name, None) for field in dataclasses.fields(result)}
    changed = {name: map_tensors(change, value) for name, value in fields.items()}
    if all(changed[name] is value for name, value in fields.items()):
        return result
    made = copy.copy(result)
    for name, value in changed.items():
        object.__setattr__(made, name, value)  # frozen ones too
    return made
