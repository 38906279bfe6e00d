"""Whether convolutions answer with the channels last whatever they are given.

So they do within a model that lays out its images itself (layout.py), and puts right what it returns.
"""

from __future__ import annotations

import threading


class _Inside(threading.local):
    model = False
    as_torch = False
    entered = False


_inside = _Inside()


def is_inside() -> bool:
    """Whether this thread runs such a model."""
    return _inside.model


def is_entered() -> bool:
    """Whether this thread runs a model, or a block of one, whose layout somebody sees to."""
    return _inside.model or _inside.entered or _inside.as_torch


class entered:  # noqa: N801
    """For a model that keeps the layout of its input."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _inside.entered
        _inside.entered = True

    def __exit__(self, *problem: object) -> None:
        _inside.entered = self._before


def answers_as_torch() -> bool:
    """Whether this thread runs a model whose sequences have to come out of a convolution in torch's layout."""
    return _inside.as_torch


class as_torch:  # noqa: N801
    """For a forward that takes views which torch's layout allows."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _inside.as_torch
        _inside.as_torch = True

    def __exit__(self, *problem: object) -> None:
        _inside.as_torch = self._before


class inside:  # noqa: N801 - to be read as `with inside()`; as a generator's context it took twice the time
    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _inside.model
        _inside.model = True

    def __exit__(self, *problem: object) -> None:
        _inside.model = self._before
