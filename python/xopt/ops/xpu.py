"""What operators without a kernel for Intel GPUs say to tensors of device xpu, torch's name for those, instead of the
dispatcher's long text. The others are registered for them in csrc/ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

_library = torch.library.Library("xopt", "IMPL")  # type: ignore[no-untyped-call]  # what is registered lives as long as this


def _refusal(op: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"xopt::{op}: input: expected tensors on the CPU, got some on xpu, for which this operator has no kernel"
        )

    return refuse


for _name in {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("xopt::")}:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_name, "XPU"):
        _op = _name.removeprefix("xopt::")
        _library.impl(_op, _refusal(_op), "XPU")  # type: ignore[no-untyped-call]
