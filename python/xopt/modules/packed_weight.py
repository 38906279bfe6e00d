"""What modules with a packed weight have in common: to others it is the weight that their source had."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from xopt.modules.packed_parameter import PackedParameter

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


class PackedWeight(nn.Module):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self._parameters["weight"]
        if type(weight) is PackedParameter:
            plain = weight.unpack()
            destination[prefix + "weight"] = nn.Parameter(plain, requires_grad=False) if keep_vars else plain

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        packed = self._parameters["weight"]
        if type(packed) is not PackedParameter or prefix + "weight" not in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            return
        # torch fills a plain parameter, with all its checks and messages; that one is packed.
        plain = nn.Parameter(torch.full(packed.shape, torch.nan, dtype=packed.dtype), requires_grad=False)
        self._parameters["weight"] = plain
        try:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            loaded = self._parameters["weight"]
        finally:
            self._parameters["weight"] = packed
        given = state_dict[prefix + "weight"]
        if loaded is not None and isinstance(given, torch.Tensor) and given.shape == packed.shape:
            packed.assign(loaded)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        packed = self._parameters["weight"]
        if type(packed) is not PackedParameter:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        before = packed.unpack()
        after = fn(before)
        self._parameters["weight"] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters["weight"] = packed
        if after.dtype == before.dtype and after.device == before.device:
            return self
        if packed.successor is None:
            can_pack = after.device.type == "cpu" and after.dtype in _FLOATING
            packed.successor = (
                PackedParameter.pack(after, after.dtype, packed.place.groups)
                if can_pack
                else nn.Parameter(after, requires_grad=False)
            )
        self._parameters["weight"] = packed.successor
        return self
