"""Eager-mode optimization of PyTorch models for Intel CPUs."""

from typing import TYPE_CHECKING, Any

# torch comes first: the native libraries share its OpenMP runtime and are linked to none of their own.
import torch  # noqa: F401

from xopt import config, ops, runtime, sycl, tuning
from xopt._C import __version__
from xopt.api import optimize
from xopt.capabilities import Capabilities, KernelInfo, capabilities, kernels
from xopt.checkpoint import CheckpointError, load, save
from xopt.config import Config
from xopt.report import Report, is_optimized, report
from xopt.tune import tune

if TYPE_CHECKING:
    from xopt.profiling import profile, profiler

config.current.apply()
tuning.start(config.current.autotune)

__all__ = [
    "Capabilities",
    "CheckpointError",
    "Config",
    "KernelInfo",
    "Report",
    "__version__",
    "capabilities",
    "config",
    "is_optimized",
    "kernels",
    "load",
    "ops",
    "optimize",
    "profile",
    "profiler",
    "report",
    "runtime",
    "save",
    "sycl",
    "tune",
    "tuning",
]


def __getattr__(name: str) -> Any:
    """The profiler, which is imported when it is first asked for."""
    if name in ("profile", "profiler"):
        from xopt import profiling

        return getattr(profiling, name)
    raise AttributeError(f"module 'xopt' has no attribute {name!r}")
