"""Whether convolutions answer with the channels last whatever they are given.

So they do within a model that lays out its images itself (layout.py), and puts right what it returns.
"""

from __future__ import annotations

import threading
from typing import ClassVar


class _State(threading.local):
    inside = False
    as_torch = False
    entered = False


state = _State()


class _Within:
    """To be read as `with inside()`; as a generator's context it took twice the time."""

    __slots__ = ("_before",)
    flag: ClassVar[str]

    def __enter__(self) -> None:
        self._before = getattr(state, self.flag)
        setattr(state, self.flag, True)

    def __exit__(self, *problem: object) -> None:
        setattr(state, self.flag, self._before)


class inside(_Within):  # noqa: N801
    """A model whose images have their channels last."""

    __slots__ = ()
    flag = "inside"


class as_torch(_Within):  # noqa: N801
    """A forward that takes views which torch's layout allows."""

    __slots__ = ()
    flag = "as_torch"


class entered(_Within):  # noqa: N801
    """A model that keeps the layout of its input."""

    __slots__ = ()
    flag = "entered"


def is_inside() -> bool:
    """Whether this thread runs a model whose images have their channels last."""
    return state.inside


def answers_as_torch() -> bool:
    """Whether this thread runs a model whose sequences have to come out of a convolution in torch's layout."""
    return state.as_torch


def is_entered() -> bool:
    """Whether this thread runs a model, or a block of one, whose layout somebody sees to."""
    return state.inside or state.entered or state.as_torch
