"""What is computed from parameters and buffers alone: once, and again after one of them has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")
Source = Tensor | float | None


class _Remembered:
    def __init__(self, sources: tuple[Source, ...], value: Any) -> None:
        self._sources = sources
        self._versions = _versions(sources)
        self.value = value

    def holds(self, sources: tuple[Source, ...]) -> bool:
        same = all(map(_is_same, sources, self._sources)) and len(sources) == len(self._sources)
        return same and self._versions is not None and _versions(sources) == self._versions

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied module computes its own."""

    def __reduce__(self) -> Any:
        return type(None), ()


def _is_same(one: Source, other: Source) -> bool:
    return one is other or (isinstance(one, float) and one == other)


def _versions(sources: tuple[Source, ...]) -> list[int] | None:
    """None: one of them is an inference tensor, whose changes nobody counts."""
    tensors = [each for each in sources if isinstance(each, Tensor)]
    if any(each.is_inference() for each in tensors):
        return None
    return [each._version for each in tensors]


def remembered(module: nn.Module, name: str, sources: tuple[Source, ...], make: Callable[[], Value]) -> Value:
    """What `make` computes from the sources, kept in the module under a name of ours."""
    known: _Remembered | None = module.__dict__.get(name)
    if known is None or not known.holds(sources):
        with torch.no_grad():
            known = module.__dict__[name] = _Remembered(sources, make())
    return known.value  # type: ignore[no-any-return]
