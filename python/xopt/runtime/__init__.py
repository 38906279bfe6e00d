"""Where models run: threads on cores of their own, several streams over a batch, and memory that is used again."""

from xopt.runtime.core_pool import CorePool, Pin, pin
from xopt.runtime.hints import Hints
from xopt.runtime.memory import POOL_LIBRARY, MemoryPool, PoolStatistics, keep_outputs, memory_pool
from xopt.runtime.multi_stream import MultiStream
from xopt.runtime.task import Task

__all__ = [
    "POOL_LIBRARY",
    "CorePool",
    "Hints",
    "MemoryPool",
    "MultiStream",
    "Pin",
    "PoolStatistics",
    "Task",
    "keep_outputs",
    "memory_pool",
    "pin",
]
