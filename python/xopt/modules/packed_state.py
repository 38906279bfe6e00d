"""What a module with packed parameters owes to those who see in it the module it was: its state dict, and its moves.

A mixin that stands before the source class. It deals with every `PackedParameter` among the module's own parameters.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from xopt import sycl
from xopt.modules.packed_parameter import PackedParameter
from xopt.ops.fakes import FLOATING


class PackedState(nn.Module):
    reads_rows: ClassVar[bool] = False
    """Whether it reads rows of its packed weight, for which there is a kernel on the CPU only."""

    def _packed_parameters(self) -> dict[str, PackedParameter]:
        own = self._parameters.items()
        return {name: parameter for name, parameter in own if type(parameter) is PackedParameter}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, packed in self._packed_parameters().items():
            with torch.inference_mode(packed.is_inference()):  # as a plain parameter's would be
                plain = packed.unpack()
            destination[prefix + name] = nn.Parameter(plain, requires_grad=False) if keep_vars else plain

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        given = {name: packed for name, packed in self._packed_parameters().items() if prefix + name in state_dict}
        # torch fills plain parameters, with all its checks and messages; those are packed.
        for name, packed in given.items():
            plain = torch.full(packed.shape, torch.nan, dtype=packed.dtype, device=packed.device)
            self._parameters[name] = nn.Parameter(plain, requires_grad=False)
        try:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            loaded = {name: self._parameters[name] for name in given}
        finally:
            self._parameters.update(given)
        for name, packed in given.items():
            value, values = state_dict[prefix + name], loaded[name]
            if values is not None and isinstance(value, torch.Tensor) and value.shape == packed.shape:
                packed.assign(values)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        packed_parameters = self._packed_parameters()
        before = {name: packed.unpack() for name, packed in packed_parameters.items()}
        after = {name: fn(values) for name, values in before.items()}
        for name in packed_parameters:
            self._parameters[name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters.update(packed_parameters)
        for name, packed in packed_parameters.items():
            moved = after[name]
            if moved.dtype == packed.dtype and moved.device == before[name].device:
                continue
            if packed.successor is None:
                packed.successor = _repacked(moved, packed, self.reads_rows)
            self._parameters[name] = packed.successor
        return self


def _repacked(values: torch.Tensor, before: PackedParameter, reads_rows: bool) -> nn.Parameter:
    if values.dtype in FLOATING and _has_kernels(values, before, reads_rows):
        place = before.place
        kind: dict[str, Any] = {"groups": place.groups, "gates": place.gates, "taps": place.taps, "split": place.split}
        return PackedParameter.pack(values, values.dtype, transposed=before.transposed, **kind)
    return nn.Parameter(values, requires_grad=False)


def _has_kernels(values: torch.Tensor, before: PackedParameter, reads_rows: bool) -> bool:
    of_the_cpu_only = reads_rows or before.place.gates is not None or before.place.taps is not None
    return values.is_cpu or (values.is_xpu and sycl.available() and not of_the_cpu_only)
