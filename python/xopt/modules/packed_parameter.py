"""A parameter whose values lie in packed form: one copy of the weight, in the layout that the kernels read.

To everybody else it is an ordinary parameter: shape, dtype and device are the logical weight's, and any torch operator
that is given one works on the unpacked values. Operators that write to it pack the result again. What leaves a model
(`state_dict`, safetensors) is unpacked by the module that owns it.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from xopt.graph.record import active
from xopt.modules.packed_layout import (
    Columns,
    Place,
    Taps,
    as_matrix,
    block_rows,
    from_blocks,
    pack_values,
    rows_of,
    whole_panels,
)
from xopt.modules.packed_view import PackedView
from xopt.modules.wide_taps import narrowed

Tensor = torch.Tensor


class _Source(NamedTuple):
    """What a parameter is a view of, and shares its packed memory with."""

    parameter: Callable[[], PackedParameter | None]
    """None: nobody else has it any more."""
    part: Callable[[Tensor], Tensor]
    """Of the source's values, this one's."""
    place: Callable[[Place], Place]


class PackedParameter(nn.Parameter):
    place: Place
    transposed: bool
    """Whether the logical weight is [in, out], as GPT-2's layers hold it, and not [out, in]."""
    successor: nn.Parameter | None
    """What took its place when its module moved to another dtype or device; modules that shared it find it here."""
    _unpacked: weakref.ref[Tensor] | None
    _viewed: weakref.ref[Tensor] | None
    """The values that views were handed out of, which follow all changes."""
    _source: _Source | None
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
        parameter._viewed = None
        parameter._source = None
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
        return Columns(place.first_column, own, own if place.features == own else whole_panels(own))

    @property
    def stride_in_stack(self) -> int:
        """Where the second matrix of a stack begins: each does so where a panel does."""
        return whole_panels(self.shape[2 if self.transposed else 1])

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
        rows = rows_of(as_matrix(weight, split), transposed)
        is_stack = rows.ndim == 3 and groups is None and taps is None
        features = len(rows) * whole_panels(rows.shape[1]) if is_stack else len(rows)
        packed = pack_values(rows, dtype, groups, gates, taps)
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
        self._follow()
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
                blocks = torch.ops.xopt.linear_unpack(packed, block_rows(rows, gates), columns, self.dtype)
                return from_blocks(blocks, gates, rows)
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
        return pack_values(self._unpack_rows(), self.dtype, place.groups, place.gates, place.taps)

    def assign(self, weight: Tensor) -> None:
        """Takes over the values of a logical weight, in place: whoever shares this parameter sees them too."""
        if weight.shape != self.shape:
            raise RuntimeError(
                f"xopt: a packed parameter keeps its shape {tuple(self.shape)}, got {tuple(weight.shape)}"
            )
        source = self._is_part_of()
        if source is None:
            self._pack_again(weight.detach())
        else:
            parameter, part_of, _ = source
            root, values, part = parameter._values_to_write()
            _copy_into(part_of(part), weight)
            root.assign(values)
            self._follow()
        self._unpacked = None
        self._matrices.clear()
        viewed = None if self._viewed is None else self._viewed()
        if viewed is not None and viewed is not weight:
            _copy_into(viewed, weight)

    def _pack_again(self, weight: Tensor) -> None:
        place = self.place
        rows = rows_of(as_matrix(weight, place.split), self.transposed)
        with torch.inference_mode(self.is_inference()):  # or it could be changed in place only there
            packed = pack_values(rows, self.dtype, place.groups, place.gates, place.taps)
        if self.is_packed_alone:
            self.packed.copy_(packed)
            if not self.packed.is_inference():  # a dispatched operator's own writing is not counted
                torch.autograd.graph.increment_version(self.packed)
        else:  # the others in there keep their values; a fused step that wants them together packs them again
            self.place = Place(packed, self.out_features, split=place.split)

    def _is_part_of(self) -> tuple[PackedParameter, Callable[[Tensor], Tensor], Callable[[Place], Place]] | None:
        """Its source, and the rest of `_Source`."""
        parameter = None if self._source is None else self._source.parameter()
        return None if self._source is None or parameter is None else (parameter, *self._source[1:])

    def _follow(self) -> None:
        """Its source may have been packed somewhere else."""
        source = self._is_part_of()
        if source is not None:
            parameter, _, place_of_part = source
            parameter._follow()
            self.place = place_of_part(parameter.place)

    def _values_to_write(self) -> tuple[PackedParameter, Tensor, Tensor]:
        """A parameter, all its values, and those of this one among them. Once they are written to, that parameter is to
        be assigned its values."""
        source = self._is_part_of()
        if source is not None and source[0].transposed == self.transposed:
            root, all_values, part = source[0]._values_to_write()
            return root, all_values, source[1](part)
        values = None if self._viewed is None else self._viewed()
        if values is None:
            with torch.inference_mode(self.is_inference()):
                values = self._unpack()
            self._viewed = weakref.ref(values)
        return self, values, values

    def _shared(
        self,
        shape: Sequence[int],
        transposed: bool,
        part: Callable[[Tensor], Tensor],
        place: Callable[[Place], Place] = lambda place: place,
        *,
        weakly: bool = False,
    ) -> PackedParameter:
        """A parameter out of the same memory. `weakly`: this one holds it."""
        with torch.inference_mode(self.is_inference()):  # torch lets both count their changes together
            shared = PackedParameter(place(self.place), shape, self.dtype, transposed)
        shared._source = _Source(weakref.ref(self) if weakly else lambda: self, part, place)
        return shared

    def turned(self) -> PackedParameter:
        """This matrix, or those of this stack, with rows and columns exchanged, out of the same memory."""
        *stack, rows, columns = self.shape
        return self._shared((*stack, columns, rows), not self.transposed, lambda values: values.mT)

    def matrix(self, index: int, *, weakly: bool = False) -> PackedParameter:
        """One of a stack's, out of the same memory."""
        columns = self.columns(index)
        assert columns is not None, "one of a stack was asked of a matrix"
        first = columns.first
        return self._shared(
            self.shape[1:],
            self.transposed,
            lambda values: values[index],
            lambda place: place._replace(first_column=first),
            weakly=weakly,
        )

    def kept_matrix(self, index: int) -> PackedParameter:
        """The same one each time: to make it takes as long as a small product."""
        found = self._matrices.get(index)
        if found is None or found.packed is not self.packed:
            found = self._matrices[index] = self.matrix(index, weakly=self._source is None)
        return found

    # An index is several steps of torch's own, of which the first alone comes to `__torch_dispatch__`.

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if self._is_for_torch(index) else torch.ops.aten.alias(self)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._is_for_torch(index):
            super().__setitem__(index, value)
        else:
            torch.ops.aten.alias(self)[index] = value

    def _is_for_torch(self, index: Any) -> bool:
        is_matrix = type(index) is int and self.is_stack
        return is_matrix or torch.compiler.is_compiling() or active.recorder is not None

    @property
    def data(self) -> Any:
        return super().data

    @data.setter
    def data(self, values: Tensor) -> None:
        """Nobody can put other memory into it, so it takes the values."""
        self.assign(values.unpack() if type(values) is PackedParameter else values)

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
            return source._shared(source.shape, source.transposed, lambda values: values)
        if not func._schema.is_mutable:
            view = _view(func, *args) if func in _VIEWS and not kwargs else None
            if view is not None:
                return view
            if _gives_views(func) and type(args[0]) is cls:
                return _written_view(func, args, kwargs)
            return _of_plain(func, *tree_map_only(cls, lambda parameter: parameter.unpack(), (args, kwargs)))
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


def _of_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """In inference mode functions come here that torch has not taken apart, of which autocast knows nothing: what these
    refuse for its dtypes, they get in the widest."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if len(dtypes) < 2:
            raise
    widest = functools.reduce(torch.promote_types, dtypes)
    args, kwargs = tree_map_only(
        Tensor, lambda tensor: tensor.to(widest) if tensor.is_floating_point() else tensor, (args, kwargs)
    )
    return func(*args, **kwargs)


@functools.cache
def _gives_views(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _written_view(func: Any, args: Any, kwargs: Any) -> Any:
    """Plain memory, of which a parameter is packed again when it is written to."""
    source = args[0]
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return func(source.unpack(), *args[1:], **kwargs)
    root, values, part = source._values_to_write()
    with torch.inference_mode(source.is_inference()):  # torch lets a view count its changes with what it is of
        return PackedView.of(root, values, func(part, *args[1:], **kwargs))


def _copy_into(values: Tensor, weight: Tensor) -> None:
    with torch.no_grad(), torch.inference_mode(values.is_inference()):
        values.copy_(weight)


def place_of(weight: Any) -> Place | None:
    """Where `torch.ops.xopt.linear` finds a weight; None: it is not packed, or not for that operator."""
    if type(weight) is not PackedParameter:
        return None
    place = weight.place
    others = (place.in_pair, place.gate_half, place.groups, place.gates, place.taps)
    return place if all(each is None for each in others) else None
