"""What the operators say to tensors of device xpu, torch's name for Intel GPUs, instead of the dispatcher's long text.

A kernel of csrc/sycl would take such tensors as they are: what is missing is the operators' side, which allocates on
the CPU and takes no queue from torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

_library = torch.library.Library("xopt", "IMPL")  # type: ignore[no-untyped-call]  # what is registered lives as long as this


def _refusal(op: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"xopt::{op}: input: expected tensors on the CPU, got some on xpu, which xopt does not take yet: its"
            " kernels for Intel GPUs are compiled and tested on the CPU's SYCL device only, see xopt.sycl.device"
        )

    return refuse


for _name in {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("xopt::")}:
    _op = _name.removeprefix("xopt::")
    _library.impl(_op, _refusal(_op), "XPU")  # type: ignore[no-untyped-call]
