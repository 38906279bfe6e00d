"""Tensors of device xpu, torch's name for Intel GPUs: loads the SYCL part when an operator is first called on them."""

from __future__ import annotations

from xopt import _C, config
from xopt.sycl import loading


def _load() -> str:
    """What is missing, or nothing."""
    try:
        loading.native().serve_torch(str(config.cache_folder() / "sycl"))
    except ImportError as error:
        return str(error)
    return ""


_C.set_sycl_loader(_load)


def synchronizations() -> int:
    """How often the host has waited for a queue of torch's: what chains of operators do not do."""
    count: int = loading.native().synchronizations_on_torch_queues()
    return count
