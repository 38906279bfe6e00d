"""Where models run: threads on cores of their own, and several streams over a batch."""

from xopt.runtime.core_pool import CorePool, Pin, pin
from xopt.runtime.hints import Hints
from xopt.runtime.multi_stream import MultiStream
from xopt.runtime.task import Task

__all__ = ["CorePool", "Hints", "MultiStream", "Pin", "Task", "pin"]
