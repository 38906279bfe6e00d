"""torch's autocast, whose state each type of device has for itself."""

from __future__ import annotations

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on this device; None: it is off. Devices that we have no kernels for, which need not
    know autocast, go by the CPU's."""
    return autocast_dtype_of("xpu" if device.type == "xpu" else "cpu")


def autocast_dtype_of(kind: str) -> torch.dtype | None:
    """The same, of a type of device."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
