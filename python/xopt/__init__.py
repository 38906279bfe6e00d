"""Eager-mode optimization of PyTorch models for Intel CPUs."""

# torch comes first: the native libraries share its OpenMP runtime and are linked to none of their own.
import torch  # noqa: F401

from xopt import config, ops
from xopt._C import __version__
from xopt.capabilities import Capabilities, KernelInfo, capabilities, kernels

config.current.apply()

__all__ = ["Capabilities", "KernelInfo", "__version__", "capabilities", "config", "kernels", "ops"]
