"""A parameter whose values lie in packed form: one copy of the weight, in the layout that the kernels read.

To everybody else it is an ordinary parameter: shape, dtype and device are the logical weight's, and any torch operator
that is given one works on the unpacked values. Operators that write to it pack the result again. What leaves a model
(`state_dict`, safetensors) is unpacked by the module that owns it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from xopt import machine
from xopt.modules.wide_taps import Wide, narrowed, widened

Tensor = torch.Tensor


_packing = threading.Lock()  # several threads may run one model, and whichever comes first packs weights together


class Taps(NamedTuple):
    """What the packed form of a transposed convolution's weight depends on."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    wide: Wide | None

    def packed_geometry(self) -> dict[str, tuple[int, ...]]:
        """Stride and dilation that the operator is told."""
        if self.wide is None:
            return {"stride": self.stride, "dilation": self.dilation}
        return {"stride": (*self.stride[:-1], 1), "dilation": (*self.dilation[:-1], 1)}

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        if self.wide is None:
            return tuple(shape)
        return (shape[0], shape[1] * self.wide.stride, *shape[2:-1], self.wide.wide_kernel)


class Place(NamedTuple):
    """Where a weight lies. One value, so that a thread that uses it never sees half of a move."""

    packed: Tensor
    """What `torch.ops.xopt.linear` or `conv` takes. It may hold several weights of linear layers, packed as one."""
    features: int
    """The output features in it: those of all its weights, or of one of a gated pair."""
    first_column: int = 0
    """Where this weight begins in it."""
    in_pair: int | None = None
    """Which of the two weights of a gated pair it is, for `torch.ops.xopt.linear_gated`; None: no such pair."""
    gate_half: int | None = None
    """Which half of this weight's rows is the gate, where its halves are a gated pair; None: they are none."""
    groups: int | None = None
    """The groups of a convolution, whose weight it is; None: a linear layer's."""
    gates: int | None = None
    """The gates of a recurrent layer, whose rows `torch.ops.xopt.recurrent` wants by blocks of units; None: plain."""
    taps: Taps | None = None
    """Of a transposed convolution, whose weight it is; None: of something else."""


class PackedParameter(nn.Parameter):
    place: Place
    transposed: bool
    """Whether the logical weight is [in, out], as GPT-2's layers hold it, and not [out, in]."""
    successor: nn.Parameter | None
    """What took its place when its module moved to another dtype or device; modules that shared it find it here."""
    _unpacked: weakref.ref[Tensor] | None

    def __new__(
        cls, place: Place, shape: Sequence[int], dtype: torch.dtype, transposed: bool = False
    ) -> PackedParameter:
        parameter: PackedParameter = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=place.packed.device, requires_grad=False
        )
        parameter.place = place
        parameter.transposed = transposed
        parameter.successor = None
        parameter._unpacked = None
        return parameter

    def __init__(self, *args: Any) -> None:
        """Everything is done in __new__; nn.Parameter's own would take the arguments for its data."""

    @property
    def packed(self) -> Tensor:
        return self.place.packed

    @property
    def out_features(self) -> int:
        if self.is_stack:
            return len(self) * self.stride_in_stack
        return self.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        if self.is_stack:
            return self.shape[1 if self.transposed else 2]
        return self.shape[0 if self.transposed else 1]

    @property
    def is_stack(self) -> bool:
        """Whether it is [matrix, out, in], packed as the columns of one weight: several products' own."""
        return len(self.shape) == 3 and self.place.groups is None and self.place.taps is None

    @property
    def stride_in_stack(self) -> int:
        """Where the second matrix of a stack begins: each does so where a panel does."""
        return _whole_panels(self.shape[2 if self.transposed else 1])

    @classmethod
    def pack(
        cls,
        weight: Tensor,
        dtype: torch.dtype,
        *,
        transposed: bool = False,
        groups: int | None = None,
        gates: int | None = None,
        taps: Taps | None = None,
    ) -> PackedParameter:
        rows = _rows(weight, transposed)
        is_stack = weight.ndim == 3 and groups is None and taps is None
        features = len(rows) * _whole_panels(rows.shape[1]) if is_stack else len(rows)
        packed = _pack(rows, dtype, groups, gates, taps)
        return cls(Place(packed, features, groups=groups, gates=gates, taps=taps), weight.shape, dtype, transposed)

    def unpack(self) -> Tensor:
        """The logical weight. While a copy is in use, the same one is given out, so that tied weights stay tied."""
        alive = self._unpacked() if self._unpacked is not None else None
        if alive is None:
            alive = self._unpack()
            if not torch.compiler.is_compiling():
                self._unpacked = weakref.ref(alive)
        return alive

    def _unpack(self) -> Tensor:
        values = self._unpack_rows()
        return values.transpose(-2, -1).contiguous() if self.transposed else values

    def _unpack_rows(self) -> Tensor:
        packed, features, first_column, in_pair, gate_half, groups, gates, taps = self.place
        with torch.no_grad():
            if taps is not None:
                shape, geometry = taps.packed_shape(self.shape), taps.packed_geometry()
                unpack = torch.ops.xopt.conv_transpose_unpack
                values = unpack(packed, shape, groups, **geometry, dtype=self.dtype)
                return values if taps.wide is None else narrowed(values, taps.wide)
            if groups is not None:
                return torch.ops.xopt.conv_unpack(packed, self.shape, groups, self.dtype)  # type: ignore[no-any-return]
            rows, columns = self.out_features, self.in_features
            if gates is not None:
                blocks = torch.ops.xopt.linear_unpack(packed, _block_rows(rows, gates), columns, self.dtype)
                return _from_blocks(blocks, gates, rows)
            if gate_half is not None:
                halves = torch.ops.xopt.linear_unpack_gated(packed, rows // 2, columns, self.dtype)
                return torch.cat(halves if gate_half == 0 else halves[::-1])
            if in_pair is not None:
                pair = torch.ops.xopt.linear_unpack_gated(packed, rows, columns, self.dtype)
                return pair[in_pair]  # type: ignore[no-any-return]
            together = torch.ops.xopt.linear_unpack(packed, features, columns, self.dtype)
            if self.is_stack:
                own_rows = self.shape[2 if self.transposed else 1]
                return together.reshape(len(self), -1, columns)[:, :own_rows].contiguous()  # type: ignore[no-any-return]
            if features == rows:
                return together  # type: ignore[no-any-return]
            return together[first_column : first_column + rows].clone()  # type: ignore[no-any-return]

    @property
    def is_packed_alone(self) -> bool:
        place = self.place
        return place.in_pair is None and place.gate_half is None and place.features == self.out_features

    def _copy_packed(self) -> Tensor:
        """Of a weight on another device, the host knows the header only where it has packed it."""
        place = self.place
        if place.packed.is_cpu or not self.is_packed_alone:
            return place.packed.clone()
        return _pack(self._unpack_rows(), self.dtype, place.groups, place.gates, place.taps)

    def assign(self, weight: Tensor) -> None:
        """Takes over the values of a logical weight, in place: whoever shares this parameter sees them too."""
        place = self.place
        with torch.inference_mode(self.is_inference()):  # or it could be changed in place only there
            packed = _pack(_rows(weight, self.transposed), self.dtype, place.groups, place.gates, place.taps)
        if self.is_packed_alone:
            self.packed.copy_(packed)
            if not self.packed.is_inference():  # a dispatched operator's own writing is not counted
                torch.autograd.graph.increment_version(self.packed)
        else:  # the others in there keep their values; a fused step that wants them together packs them again
            self.place = Place(packed, self.out_features)
        self._unpacked = None

    # ---- What torch asks of a tensor that wraps others ---------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed"], (tuple(self.shape), self.dtype, tuple(self.place[1:]), self.transposed)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any) -> Tensor:
        shape, dtype, place, transposed = context
        return PackedParameter(Place(inner["packed"], *place), shape, dtype, transposed)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            source = args[0]
            with torch.inference_mode(source.is_inference()):  # torch lets both count their changes together
                return cls(source.place, source.shape, source.dtype, source.transposed)
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
            if id(self.packed) not in memo:
                memo[id(self.packed)] = self._copy_packed()
            place = self.place._replace(packed=memo[id(self.packed)])
            memo[id(self)] = PackedParameter(place, self.shape, self.dtype, self.transposed)
        copied: PackedParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PackedParameter, (self.place, tuple(self.shape), self.dtype, self.transposed)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedParameter({self.unpack()!r})"


def _pack(weight: Tensor, dtype: torch.dtype, groups: int | None, gates: int | None, taps: Taps | None) -> Tensor:
    with torch.no_grad():
        if taps is not None:
            values = weight.detach() if taps.wide is None else widened(weight.detach(), taps.wide)
            pack = torch.ops.xopt.conv_transpose_pack
            return pack(values, groups, **taps.packed_geometry(), dtype=dtype)  # type: ignore[no-any-return]
        if groups is not None:
            return torch.ops.xopt.conv_pack(weight.detach(), groups, dtype=dtype)  # type: ignore[no-any-return]
        rows = weight.detach() if gates is None else _in_blocks(weight.detach(), gates)
        rows = _one_below_another(rows) if rows.ndim == 3 else rows
        return torch.ops.xopt.linear_pack(rows, dtype=dtype)  # type: ignore[no-any-return]


def _whole_panels(rows: int) -> int:
    return -(-rows // _PANEL) * _PANEL


def _one_below_another(stack: Tensor) -> Tensor:
    missing = _whole_panels(stack.shape[1]) - stack.shape[1]
    return torch.nn.functional.pad(stack, (0, 0, 0, missing)).flatten(0, 1) if missing else stack.flatten(0, 1)


# ---- The weights of a recurrent layer: rows [gate, unit] packed as [block of 32 units, gate, unit of the block] ------


def _block_rows(rows: int, gates: int) -> int:
    return gates * _whole_panels(rows // gates)


def _in_blocks(weight: Tensor, gates: int) -> Tensor:
    rows, columns = weight.shape
    padded = weight.new_zeros((gates, _block_rows(rows, gates) // gates, columns))
    padded[:, : rows // gates] = weight.reshape(gates, rows // gates, columns)
    return padded.reshape(gates, -1, _PANEL, columns).transpose(0, 1).reshape(-1, columns)


def _from_blocks(blocks: Tensor, gates: int, rows: int) -> Tensor:
    columns = blocks.shape[1]
    by_gate = blocks.reshape(-1, gates, _PANEL, columns).transpose(0, 1).reshape(gates, -1, columns)
    return by_gate[:, : rows // gates].reshape(rows, columns)


# ---- Several weights in one ------------------------------------------------------------------------------------------


def pack_as_one(parameters: Sequence[PackedParameter]) -> bool:
    """Lets weights of one input lie side by side, so that one product serves all. False where that cannot be: they
    belong together with others already, or do not end where panels end."""
    with _packing:
        if are_one(parameters):
            return True
        sizes = [parameter.out_features for parameter in parameters]
        if not _can_move(parameters) or any(size % _PANEL for size in sizes[:-1]):
            return False
        packed = _packed_together(parameters)
        first = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            parameter.place = Place(packed, sum(sizes), first)
            first += size
        machine.give_back_freed_memory()
        return True


def pack_as_pair(gate: PackedParameter, up: PackedParameter) -> bool:
    """The same for the two weights of a gated pair."""
    with _packing:
        if are_pair(gate, up):
            return True
        if not _can_move((gate, up)) or gate.out_features != up.out_features:
            return False
        packed = _packed_as_pair(*(_rows(parameter.unpack(), parameter.transposed) for parameter in (gate, up)))
        gate.place = Place(packed, gate.out_features, in_pair=0)
        up.place = Place(packed, up.out_features, in_pair=1)
        machine.give_back_freed_memory()
        return True


def pack_as_halves(weight: PackedParameter, gate: int) -> bool:
    """The same for the two halves of one weight's rows, of which `gate` tells the gate's."""
    with _packing:
        if weight.place.gate_half == gate:
            return True
        if not weight.is_packed_alone or weight.out_features % 2 != 0:
            return False
        halves = _rows(weight.unpack(), weight.transposed).chunk(2)
        packed = _packed_as_pair(halves[gate], halves[1 - gate])
        weight.place = Place(packed, weight.out_features, gate_half=gate)
        del halves
        machine.give_back_freed_memory()
        return True


@torch.no_grad()
def _packed_together(parameters: Sequence[PackedParameter]) -> Tensor:
    together = torch.cat([_rows(parameter.unpack(), parameter.transposed) for parameter in parameters])
    return torch.ops.xopt.linear_pack(together, dtype=together.dtype)  # type: ignore[no-any-return]


@torch.no_grad()
def _packed_as_pair(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.xopt.linear_pack_gated(gate, up, dtype=gate.dtype)  # type: ignore[no-any-return]


def are_one(parameters: Sequence[PackedParameter]) -> bool:
    packed, first = parameters[0].place.packed, 0
    for parameter in parameters:
        place = parameter.place
        if place.packed is not packed or place.first_column != first or place.in_pair is not None:
            return False
        first += parameter.out_features
    return True


def are_pair(gate: PackedParameter, up: PackedParameter) -> bool:
    return gate.place.packed is up.place.packed and gate.place.in_pair == 0 and up.place.in_pair == 1


def _can_move(parameters: Sequence[PackedParameter]) -> bool:
    first = parameters[0]
    distinct = len({id(parameter) for parameter in parameters}) == len(parameters)
    alike = all(each.dtype == first.dtype and each.in_features == first.in_features for each in parameters)
    return distinct and alike and all(each.is_packed_alone for each in parameters)


def _rows(weight: Tensor, transposed: bool) -> Tensor:
    """A logical weight as [out, in], or [matrix, out, in]."""
    return weight.transpose(-2, -1) if transposed else weight


_PANEL = 32
