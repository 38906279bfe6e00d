"""Several packed weights of one input in one, so that a single product serves all, and the pairs of gated ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from xopt import machine
from xopt.modules.packed_layout import PANEL, Place, rows_of
from xopt.modules.packed_parameter import PackedParameter

Tensor = torch.Tensor

_packing = threading.Lock()  # several threads may run one model, and whichever comes first packs weights together


def pack_as_one(parameters: Sequence[PackedParameter]) -> bool:
    """Lets weights of one input lie side by side, so that one product serves all. False where that cannot be: they
    belong together with others already, or do not end where panels end."""
    with _packing:
        if are_one(parameters):
            return True
        sizes = [parameter.out_features for parameter in parameters]
        if not _can_move(parameters) or any(size % PANEL for size in sizes[:-1]):
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
        packed = _packed_as_pair(gate, *(rows_of(parameter.unpack(), parameter.transposed) for parameter in (gate, up)))
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
        halves = rows_of(weight.unpack(), weight.transposed).chunk(2)
        packed = _packed_as_pair(weight, halves[gate], halves[1 - gate])
        weight.place = Place(packed, weight.out_features, gate_half=gate)
        del halves
        machine.give_back_freed_memory()
        return True


# Packed in a forward under inference mode, so that what is written to them is counted all the same.


@torch.no_grad()
def _packed_together(parameters: Sequence[PackedParameter]) -> Tensor:
    together = torch.cat([rows_of(parameter.unpack(), parameter.transposed) for parameter in parameters])
    with torch.inference_mode(parameters[0].is_inference()):
        return torch.ops.xopt.linear_pack(together, dtype=together.dtype)  # type: ignore[no-any-return]


@torch.no_grad()
def _packed_as_pair(like: PackedParameter, gate: Tensor, up: Tensor) -> Tensor:
    with torch.inference_mode(like.is_inference()):
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
