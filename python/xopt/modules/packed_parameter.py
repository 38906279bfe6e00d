"""A parameter whose values lie in packed form: one copy of the weight, in the layout that the kernels read.

To everybody else it is an ordinary parameter: shape, dtype and device are the logical weight's, and any torch operator
that is given one works on the unpacked values. Operators that write to it pack the result again. What leaves a model
(`state_dict`, safetensors) is unpacked by the module that owns it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

Tensor = torch.Tensor


class PackedParameter(nn.Parameter):
    packed: Tensor
    """What `torch.ops.xopt.linear` takes."""
    successor: nn.Parameter | None
    """What took its place when its module moved to another dtype or device; modules that shared it find it here."""
    _unpacked: weakref.ref[Tensor] | None

    def __new__(cls, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> PackedParameter:
        parameter: PackedParameter = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=packed.device, requires_grad=False
        )
        parameter.packed = packed
        parameter.successor = None
        parameter._unpacked = None
        return parameter

    def __init__(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Everything is done in __new__; nn.Parameter's own would take the arguments for its data."""

    @classmethod
    def pack(cls, weight: Tensor, dtype: torch.dtype) -> PackedParameter:
        with torch.no_grad():
            packed = torch.ops.xopt.linear_pack(weight.detach(), dtype=dtype)
        return cls(packed, weight.shape, dtype)

    def unpack(self) -> Tensor:
        """The logical weight. While a copy is in use, the same one is given out, so that tied weights stay tied."""
        alive = self._unpacked() if self._unpacked is not None else None
        if alive is None:
            with torch.no_grad():
                alive = torch.ops.xopt.linear_unpack(self.packed, self.shape[0], self.shape[1], self.dtype)
            if not torch.compiler.is_compiling():
                self._unpacked = weakref.ref(alive)
        return alive

    def assign(self, weight: Tensor) -> None:
        """Takes over the values of a logical weight, in place: whoever shares this parameter sees them too."""
        with torch.no_grad():
            self.packed.copy_(torch.ops.xopt.linear_pack(weight.detach(), dtype=self.dtype))
        self._unpacked = None

    # ---- What torch asks of a tensor that wraps others ---------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed"], (tuple(self.shape), self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any) -> Tensor:
        shape, dtype = context
        return PackedParameter(inner["packed"], shape, dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            source = args[0]
            return cls(source.packed, source.shape, source.dtype)
        if not func._schema.is_mutable:
            args, kwargs = tree_map_only(cls, lambda parameter: parameter.unpack(), (args, kwargs))
            return func(*args, **kwargs)
        # A private copy, so that nobody who holds the shared one sees it change before the values are packed.
        plain: dict[int, tuple[PackedParameter, Tensor]] = {}

        def copy_of(parameter: PackedParameter) -> Tensor:
            return plain.setdefault(id(parameter), (parameter, parameter.unpack().clone()))[1]

        args, kwargs = tree_map_only(cls, copy_of, (args, kwargs))
        result = func(*args, **kwargs)
        for parameter, values in plain.values():
            parameter.assign(values)
            if result is values:
                result = parameter
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedParameter:
        if id(self) not in memo:
            memo[id(self)] = PackedParameter(self.packed.clone(), self.shape, self.dtype)
        copied: PackedParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PackedParameter, (self.packed, tuple(self.shape), self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedParameter({self.unpack()!r})"
