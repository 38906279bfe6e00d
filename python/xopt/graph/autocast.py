"""torch's autocast, whose state each type of device has for itself."""

from __future__ import annotations

import torch


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast computes in on this type of device; None: it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
