"""Whose calls are tuned: those of a model's forward, or by XOPT_AUTOTUNE all of the process."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from xopt import _C
from xopt.tuning.store import open_store
from xopt.tuning.tuned import Tuned

_reading = threading.Lock()
_was_read = False


def read_once() -> None:
    """Takes over what is on disk, at the first use in this process."""
    global _was_read
    with _reading:
        if _was_read:
            return
        _was_read = True
        for one in open_store().read():
            try:
                _C.add_tuned(
                    *(one.kernel, one.dtype, one.level, one.threads, list(one.sizes), list(one.choice)),
                    *(one.seconds, one.default_seconds),
                )
            except (ValueError, RuntimeError):  # of a build that has other kernels or choices
                continue


def write_fresh() -> None:
    """Keeps what was found since the last time."""
    open_store().write([Tuned.of_row(row) for row in _C.take_fresh_tuned()])


def start(mode: str) -> None:
    """Tunes all calls of this process, if that is asked for."""
    if mode == "off":
        return
    read_once()
    _C.set_tuning(mode)
    atexit.register(write_fresh)


@contextmanager
def forced(choice: Sequence[int]) -> Iterator[None]:
    """Each product, convolution and attention of this thread runs by this choice, for tests and benches."""
    _C.force_tuning(list(choice))
    try:
        yield
    finally:
        _C.leave_tuning()


class ModelTuning:
    """Around each forward of a model: its calls run as they were tuned, and in mode "max" are tuned at first sight.
    Copies of the model begin with nothing used."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._used: dict[int, None] = {}

    @property
    def used(self) -> tuple[Tuned, ...]:
        """What calls of this model were known as, in this process."""
        rows = _C.tuned_calls()
        return tuple(Tuned.of_row(rows[number]) for number in self._used if number < len(rows))

    def __enter__(self) -> None:
        if not _was_read:
            read_once()
        _C.enter_tuning(self.mode)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._used.update(dict.fromkeys(_C.leave_tuning()))
        if _C.has_fresh_tuned():
            write_fresh()

    def __reduce__(self) -> Any:
        return ModelTuning, (self.mode,)


def of_model(model: Any) -> ModelTuning:
    """Of a model that is tuned, by its configuration or by `xopt.tune`."""
    tuning = getattr(model.__dict__.get("forward"), "tuning", None)
    if not isinstance(tuning, ModelTuning):
        raise ValueError(f"of_model: model: expected one that is tuned, got a {type(model).__name__} that is not")
    return tuning
