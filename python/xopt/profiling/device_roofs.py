"""The roofs of a device that torch drives: products by dtype, and copying, measured through torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xopt.profiling.roof_cache import COPY, cached_roofs
from xopt.roofs import Roof, Roofs

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_SIZES = {"f32": 4096, "bf16": 8192, "f16": 8192}
_COPY_BYTES = 1 << 30
_ROUNDS = 5
_CALLS = 10


def name_of_device(device: str) -> str:
    """The maker's name of "cuda:0"."""
    return str(_module(device).get_device_name(torch.device(device)))


def roofs_of_device(device: str, *, remeasure: bool = False) -> Roofs:
    """From the cache, or measured now and put there. Of fp32 as torch.set_float32_matmul_precision has it now."""
    key: dict[str, object] = {
        "device": name_of_device(device),
        "torch": torch.__version__,
        "f32": torch.get_float32_matmul_precision(),
    }
    return cached_roofs(key, lambda: measure_device(device), {*_DTYPES, COPY}, remeasure=remeasure)


def measure_device(device: str) -> Roofs:
    """Reading is taken to be as fast as copying, by bytes read and written."""
    kinds = {}
    with torch.inference_mode():
        for kind, dtype in _DTYPES.items():
            size = _SIZES[kind]
            left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            product = torch.empty_like(left)
            seconds = _seconds(device, lambda a=left, b=right, out=product: torch.mm(a, b, out=out))  # type: ignore[misc]
            kinds[kind] = Roof(2.0 * size**3 / seconds, f"torch.mm of {size}")
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = Roof(2.0 * _COPY_BYTES / _seconds(device, lambda: target.copy_(source)), "copy_")
    return Roofs(0, {**kinds, "read": copied, COPY: copied})


def _seconds(device: str, call: Callable[[], object]) -> float:
    """Of a call, the fastest round's, by the device's own clock."""
    module = _module(device)
    call()
    rounds: list[float] = []
    with module.device(torch.device(device)):
        for _ in range(_ROUNDS):
            start, end = (module.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_CALLS):
                call()
            end.record()
            end.synchronize()
            rounds.append(start.elapsed_time(end) / 1e3 / _CALLS)
    return min(rounds)


def _module(device: str) -> Any:
    """torch.cuda or torch.xpu."""
    return getattr(torch, device.partition(":")[0])
