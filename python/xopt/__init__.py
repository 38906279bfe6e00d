"""Eager-mode optimization of PyTorch models for Intel CPUs."""

# torch comes first: the native libraries share its OpenMP runtime and are linked to none of their own.
import torch  # noqa: F401

from xopt import config, ops, runtime
from xopt._C import __version__
from xopt.api import optimize
from xopt.capabilities import Capabilities, KernelInfo, capabilities, kernels
from xopt.checkpoint import CheckpointError, load, save
from xopt.config import Config
from xopt.report import Report, report

config.current.apply()

__all__ = [
    "Capabilities",
    "CheckpointError",
    "Config",
    "KernelInfo",
    "Report",
    "__version__",
    "capabilities",
    "config",
    "kernels",
    "load",
    "ops",
    "optimize",
    "report",
    "runtime",
    "save",
]
