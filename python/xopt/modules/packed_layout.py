"""Where and how the values of a weight lie in packed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from xopt.modules.wide_taps import Wide, widened

Tensor = torch.Tensor

PANEL = 32


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


def pack_values(weight: Tensor, dtype: torch.dtype, groups: int | None, gates: int | None, taps: Taps | None) -> Tensor:
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


def whole_panels(rows: int) -> int:
    return -(-rows // PANEL) * PANEL


def _one_below_another(stack: Tensor) -> Tensor:
    missing = whole_panels(stack.shape[1]) - stack.shape[1]
    return torch.nn.functional.pad(stack, (0, 0, 0, missing)).flatten(0, 1) if missing else stack.flatten(0, 1)


# ---- The weights of a recurrent layer: rows [gate, unit] packed as [block of 32 units, gate, unit of the block] ------


def block_rows(rows: int, gates: int) -> int:
    return gates * whole_panels(rows // gates)


def _in_blocks(weight: Tensor, gates: int) -> Tensor:
    rows, columns = weight.shape
    padded = weight.new_zeros((gates, block_rows(rows, gates) // gates, columns))
    padded[:, : rows // gates] = weight.reshape(gates, rows // gates, columns)
    return padded.reshape(gates, -1, PANEL, columns).transpose(0, 1).reshape(-1, columns)


def from_blocks(blocks: Tensor, gates: int, rows: int) -> Tensor:
    columns = blocks.shape[1]
    by_gate = blocks.reshape(-1, gates, PANEL, columns).transpose(0, 1).reshape(gates, -1, columns)
    return by_gate[:, : rows // gates].reshape(rows, columns)


def as_matrix(weight: Tensor, split: int) -> Tensor:
    return weight.reshape(math.prod(weight.shape[:split]), -1) if split else weight


def rows_of(weight: Tensor, transposed: bool) -> Tensor:
    """A logical weight as [out, in], or [matrix, out, in]."""
    return weight.transpose(-2, -1) if transposed else weight
