"""The fake and the cost of recurrent networks."""

from __future__ import annotations

import math

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import FLOATING, Tensor, check, fake_of
from xopt.ops.linear import fitting_itemsizes

_BLOCK = 32  # units whose gates' sums lie together in a packed weight


@fake_of("recurrent")
def _recurrent(
    input: Tensor,
    weights: list[Tensor],
    hidden: Tensor | None = None,
    cell_state: Tensor | None = None,
    batch_sizes: Tensor | None = None,
    *,
    cell: str,
    hidden_size: int,
    proj_size: int = 0,
    num_layers: int = 1,
    bias: bool = True,
    bidirectional: bool = False,
    batch_first: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    named = {"input": input, "hidden": hidden, "cell_state": cell_state, "batch_sizes": batch_sizes}
    check("recurrent", named | {f"weights[{n}]": weight for n, weight in enumerate(weights)}, FLOATING)
    expected = 3 if batch_sizes is None else 2
    if input.dim() != expected:
        raise RuntimeError(f"xopt::recurrent: input: expected {expected} dimensions, got {input.dim()}")
    if batch_sizes is not None and hidden is None:
        raise RuntimeError("xopt::recurrent: hidden: expected a tensor with batch_sizes, got None")
    batch = input.shape[0 if batch_first else 1] if hidden is None else hidden.shape[1]
    outputs, directions = proj_size or hidden_size, 2 if bidirectional else 1
    dtype, states = out_dtype or input.dtype, num_layers * directions
    return (
        input.new_empty((*input.shape[:-1], directions * outputs), dtype=dtype),
        input.new_empty((states, batch, outputs), dtype=dtype),
        input.new_empty((states, batch, hidden_size) if cell == "lstm" else (0,), dtype=dtype),
    )


@cost_of("recurrent", category="gemm", kernel="gemm")
def _recurrent_work(
    input: Shape,
    weights: list[Shape],
    *states: object,
    cell: str,
    hidden_size: int,
    proj_size: int = 0,
    num_layers: int = 1,
    bidirectional: bool = False,
    **options: object,
) -> Work:
    outputs, directions = proj_size or hidden_size, 2 if bidirectional else 1
    gates = {"lstm": 4, "gru": 3}.get(cell, 1)
    terms = 0  # of all layers' products, for one position
    for layer in range(num_layers):
        features = input[-1] if layer == 0 else directions * outputs
        terms += directions * (gates * hidden_size * (features + outputs) + hidden_size * proj_size)
    size = f"{joined(input)} to {directions * outputs}, {num_layers} layers"
    sums = -(-hidden_size // _BLOCK) * _BLOCK * gates
    itemsizes = fitting_itemsizes(weights[0], sums, input[-1])
    return Work(size, 2 * math.prod(input[:-1]) * terms, itemsizes=itemsizes)
