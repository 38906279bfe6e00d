"""One batch on several groups of cores at once: many small teams of threads instead of one large one.

Layers that are too small to keep all cores busy, or that wait for each other at the end of each parallel region, gain
by it: each stream runs the whole model on its part of the batch, on cores of its own.
"""

from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

from torch import nn

from xopt.runtime.core_pool import CorePool
from xopt.runtime.hints import DEFAULT, Call, Hint, Hints, join, split_call
from xopt.runtime.task import Task


def _call(model: nn.Module, call: Call) -> Any:
    args, kwargs = call
    return model(*args, **kwargs)


class MultiStream(nn.Module):
    """`model` on a batch that is split over streams, each with cores and a thread of its own; outputs are joined.

    `pool` is divided among `streams` streams, by default one for each core; or it is a list of pools, one for each
    stream. `split` says how arguments are divided, `join` how outputs are joined: a dimension (the first, unless told
    otherwise), or hints that follow the structure of the values:

        MultiStream(model, pool, streams=2, split=Hints(0, None, state={"cache": 1}), join={"loss": None, "logits": 0})

    In arguments, None hands a value whole to each stream; in outputs, it takes the first stream's, and a function is
    called with the list of all (`join=list` does not join at all). A batch that does not divide evenly gives the first
    streams a row more; of a batch with fewer rows than there are streams, some streams get none and do not run.

    The model is shared, not copied. An exception of a stream is raised here, when all streams have ended.
    """

    def __init__(
        self,
        model: nn.Module,
        pool: CorePool | Sequence[CorePool],
        streams: int | None = None,
        *,
        split: Hint | Hints = DEFAULT,
        join: Hint = DEFAULT,
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._tasks = [Task(_call, part) for part in _pools(pool, streams)]
        self._split = split
        self._join = join

    @property
    def pools(self) -> tuple[CorePool, ...]:
        """The cores of each stream."""
        return tuple(task.pool for task in self._tasks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        calls = split_call((args, kwargs), self._split, len(self._tasks))
        futures = [task(self.model, call) for task, call in zip(self._tasks, calls, strict=False)]
        wait(futures)
        return join([future.result() for future in futures], self._join)

    def extra_repr(self) -> str:
        return f"streams={len(self._tasks)}, cores={[list(pool) for pool in self.pools]}"


def _pools(pool: CorePool | Sequence[CorePool], streams: int | None) -> tuple[CorePool, ...]:
    if isinstance(pool, CorePool):
        if streams is not None and not 1 <= streams <= len(pool):
            raise ValueError(f"MultiStream: streams is {streams}, expected 1 to {len(pool)}, the number of cores")
        return pool.split(len(pool) if streams is None else streams)
    pools = tuple(pool)
    if not pools or not all(isinstance(each, CorePool) for each in pools):
        raise TypeError(f"MultiStream: pool: expected a CorePool or a list of them, got {pool!r}")
    if streams not in (None, len(pools)):
        raise ValueError(f"MultiStream: streams is {streams}, but {len(pools)} pools were given, one for each stream")
    return pools
