"""A parameter whose values lie in packed form: one copy of the weight, in the layout that the kernels read.

To everybody else it is an ordinary parameter: shape, dtype and device are the logical weight's, and any torch operator
that is given one works on the unpacked values. Operators that write to it pack the result again. What leaves a model
(`state_dict`, safetensors) is unpacked by the module that owns it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from xopt.modules.wide_taps import Wide, narrowed, widened

Tensor = torch.Tensor


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
    split: int = 0
    """Of a weight of three dimensions that is one matrix, how many of them are its first (a projection onto [head,
    depth] has one); 0: none is."""


class Columns(NamedTuple):
    first: int
    features: int
    computed: int
    """How many a product has: whole panels, where others come after them."""


class PackedParameter(nn.Parameter):
    place: Place
    transposed: bool
    """Whether the logical weight is [in, out], as GPT-2's layers hold it, and not [out, in]."""
    successor: nn.Parameter | None
    """What took its place when its module moved to another dtype or device; modules that shared it find it here."""
    _unpacked: weakref.ref[Tensor] | None
    _matrices: dict[int, PackedParameter]
    """Of a stack, those that somebody asked for."""

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
        parameter._matrices = {}
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
        return self._matrix_shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        if self.is_stack:
            return self.shape[1 if self.transposed else 2]
        return self._matrix_shape[0 if self.transposed else 1]

    @property
    def _matrix_shape(self) -> tuple[int, int]:
        split = self.place.split
        if not split:
            return self.shape[0], self.shape[1]
        return math.prod(self.shape[:split]), math.prod(self.shape[split:])

    @property
    def is_stack(self) -> bool:
        """Whether it is [matrix, out, in], packed as the columns of one weight: several products' own."""
        place = self.place
        return len(self.shape) == 3 and place.groups is None and place.taps is None and not place.split

    def columns(self, index: int | None = None) -> Columns | None:
        """Of the packed weight, those of this matrix, or of one of this stack; None: it is no matrix, or no stack."""
        if self.is_stack != (index is not None):
            return None
        if index is not None:
            stride = self.stride_in_stack
            return Columns(range(len(self))[index] * stride, self.shape[2 if self.transposed else 1], stride)
        place, own = self.place, self.out_features
        return Columns(place.first_column, own, own if place.features == own else _whole_panels(own))

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
        split: int = 0,
    ) -> PackedParameter:
        rows = rows_of(_as_matrix(weight, split), transposed)
        is_stack = rows.ndim == 3 and groups is None and taps is None
        features = len(rows) * _whole_panels(rows.shape[1]) if is_stack else len(rows)
        packed = _pack(rows, dtype, groups, gates, taps)
        place = Place(packed, features, groups=groups, gates=gates, taps=taps, split=split)
        return cls(place, weight.shape, dtype, transposed)

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
        values = values.transpose(-2, -1).contiguous() if self.transposed else values
        return values.reshape(self.shape) if self.place.split else values

    def _unpack_rows(self) -> Tensor:
        packed, features, first_column, in_pair, gate_half, groups, gates, taps, _ = self.place
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
        rows = rows_of(_as_matrix(weight, place.split), self.transposed)
        with torch.inference_mode(self.is_inference()):  # or it could be changed in place only there
            packed = _pack(rows, self.dtype, place.groups, place.gates, place.taps)
        if self.is_packed_alone:
            self.packed.copy_(packed)
            if not self.packed.is_inference():  # a dispatched operator's own writing is not counted
                torch.autograd.graph.increment_version(self.packed)
        else:  # the others in there keep their values; a fused step that wants them together packs them again
            self.place = Place(packed, self.out_features, split=place.split)
        self._unpacked = None
        self._matrices.clear()

    def turned(self) -> PackedParameter:
        """This matrix, or those of this stack, with rows and columns exchanged, out of the same memory."""
        *stack, rows, columns = self.shape
        with torch.inference_mode(self.is_inference()):
            return PackedParameter(self.place, (*stack, columns, rows), self.dtype, not self.transposed)

    def matrix(self, index: int) -> PackedParameter:
        """One of a stack's, out of the same memory."""
        columns = self.columns(index)
        assert columns is not None, "one of a stack was asked of a matrix"
        place = self.place._replace(first_column=columns.first)
        with torch.inference_mode(self.is_inference()):  # torch lets both count their changes together
            return PackedParameter(place, self.shape[1:], self.dtype, self.transposed)

    def kept_matrix(self, index: int) -> PackedParameter:
        """The same one each time: to make it takes as long as a small product."""
        found = self._matrices.get(index)
        if found is None or found.packed is not self.packed:
            found = self._matrices[index] = self.matrix(index)
        return found

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
            view = _view(func, *args) if func in _VIEWS and not kwargs else None
            if view is not None:
                return view
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


_VIEWS = (torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.select.int)


def _view(func: Any, of: PackedParameter, *numbers: int) -> PackedParameter | None:
    """A view of a weight that products can read where it lies; None: it takes the unpacked values."""
    if place_of(of) is None or type(of.packed) is not Tensor or torch.compiler.is_compiling():
        return None
    if func is torch.ops.aten.select.int:
        return of.matrix(numbers[1]) if of.is_stack and numbers[0] == 0 else None
    last = [of.ndim - 2, of.ndim - 1]
    exchanged = not numbers or sorted(number % of.ndim for number in numbers) == last
    return of.turned() if exchanged and not of.place.split else None


def place_of(weight: Any) -> Place | None:
    """Where `torch.ops.xopt.linear` finds a weight; None: it is not packed, or not for that operator."""
    if type(weight) is not PackedParameter:
        return None
    place = weight.place
    others = (place.in_pair, place.gate_half, place.groups, place.gates, place.taps)
    return place if all(each is None for each in others) else None


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
    return -(-rows // PANEL) * PANEL


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
    return padded.reshape(gates, -1, PANEL, columns).transpose(0, 1).reshape(-1, columns)


def _from_blocks(blocks: Tensor, gates: int, rows: int) -> Tensor:
    columns = blocks.shape[1]
    by_gate = blocks.reshape(-1, gates, PANEL, columns).transpose(0, 1).reshape(gates, -1, columns)
    return by_gate[:, : rows // gates].reshape(rows, columns)


def _as_matrix(weight: Tensor, split: int) -> Tensor:
    return weight.reshape(math.prod(weight.shape[:split]), -1) if split else weight


def rows_of(weight: Tensor, transposed: bool) -> Tensor:
    """A logical weight as [out, in], or [matrix, out, in]."""
    return weight.transpose(-2, -1) if transposed else weight


PANEL = 32
