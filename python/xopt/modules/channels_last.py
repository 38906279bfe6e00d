"""Whether convolutions answer with the channels last whatever they are given.

So they do within a model that lays out its images itself (layout.py), and puts right what it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager


class _Inside(threading.local):
    model = False


_inside = _Inside()


def is_inside() -> bool:
    """Whether this thread runs such a model."""
    return _inside.model


@contextmanager
def inside() -> Generator[None]:
    before = _inside.model
    _inside.model = True
    try:
        yield
    finally:
        _inside.model = before
