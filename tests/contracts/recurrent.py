"""What recurrent layers owe their callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.contracts.operands import FLOATS, BadArgument, Call, K, N, Tensor, X, ops, random
from xopt.modules.packed_parameter import PackedParameter

SCHEMAS = {
    "recurrent": "recurrent(Tensor input, Tensor[] weights, Tensor? hidden=None, Tensor? cell_state=None, "
    "Tensor? batch_sizes=None, *, str cell, int hidden_size, int proj_size=0, int num_layers=1, bool bias=True, "
    "bool bidirectional=False, bool batch_first=False, ScalarType? out_dtype=None) "
    "-> (Tensor out, Tensor last_hidden, Tensor last_cell)",
}


def recurrent_weights(gates: int, dtype: torch.dtype, n: int = N, k: int = K) -> list[Tensor]:
    """Of one direction of a layer, with biases."""
    weights = [PackedParameter.pack(random(gates * n, size), dtype, gates=gates).packed for size in (k, n)]
    return [*weights, random(gates * n), random(gates * n)]


def samples_recurrent() -> Iterator[Call]:
    for dtype, (cell, gates) in itertools.product(FLOATS, (("lstm", 4), ("gru", 3), ("rnn_tanh", 1))):
        options = {"cell": cell, "hidden_size": N}
        weights = recurrent_weights(gates, dtype)
        yield (random(5, 3, K, dtype=dtype), weights), options
        states = (random(1, 3, N), random(1, 3, N) if cell == "lstm" else None)
        yield (random(3, 5, K, dtype=dtype), weights, *states), options | {"batch_first": True}
        both = {"bidirectional": True, "out_dtype": torch.float32}
        state = random(2, 3, N, dtype=dtype)
        yield (random(6, K), weights * 2, state, None, torch.tensor([3, 2, 1])), options | both
        yield (random(4, 0, K), weights), options


STEPS = random(5, 3, K)
CELL = {"cell": "lstm", "hidden_size": N}
WEIGHTS = recurrent_weights(4, torch.float32)
SIZES = torch.tensor([3, 1])
BAD_ARGUMENTS: list[BadArgument] = [
    (lambda: ops.recurrent(STEPS.double(), WEIGHTS, **CELL), "input: expected dtype .*, got float64"),
    (lambda: ops.recurrent(X, WEIGHTS, **CELL), r"input: expected three dimensions, got shape \[3, 24\]"),
    (lambda: ops.recurrent(STEPS[:0], WEIGHTS, **CELL), "input: expected at least one time step, got 0"),
    (
        lambda: ops.recurrent(STEPS[..., 1:], WEIGHTS, **CELL),
        f"input: expected a last dimension of {K}, .* got {K - 1}",
    ),
    (lambda: ops.recurrent(STEPS, WEIGHTS[:3], **CELL), "weights: expected 4 tensors, got 3"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, bidirectional=True, **CELL), "weights: expected 8 tensors, got 4"),
    (lambda: ops.recurrent(STEPS, WEIGHTS[::-1], **CELL), "packed: expected dtype uint8, got float32"),
    (lambda: ops.recurrent(STEPS, [*WEIGHTS[:3], random(N)], **CELL), r"weights: expected shape \[160\], got \[40\]"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, random(1, 4, N), **CELL), r"hidden: expected shape \[1, 3, 40\], got"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, None, random(3, N), **CELL), r"cell_state: expected shape .* got \[3, 40\]"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, cell="lstms", hidden_size=N), "cell: expected one of lstm, gru, .*'lstms'"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, cell="gru", hidden_size=N), "out_features: expected 256, .* got 192"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, cell="lstm", hidden_size=0), "hidden_size: expected at least 1, got 0"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, num_layers=0, **CELL), "num_layers: expected at least 1, got 0"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, proj_size=-1, **CELL), "proj_size: expected 0, or a positive number .* -1"),
    (lambda: ops.recurrent(STEPS, WEIGHTS, out_dtype=torch.int8, **CELL), "out_dtype: expected one of .* got int8"),
    (
        lambda: ops.recurrent(STEPS, WEIGHTS, None, random(1, 3, N), cell="gru", hidden_size=N),
        "cell_state: expected None for a cell other than lstm, got a tensor",
    ),
    (lambda: ops.recurrent(X, WEIGHTS, None, None, SIZES, **CELL), "hidden: expected a tensor with batch_sizes, got"),
    (
        lambda: ops.recurrent(X, WEIGHTS, random(1, 3, N), None, SIZES, **CELL),
        "batch_sizes: expected a sum of 3, the input's rows, got 4",
    ),
    (lambda: ops.recurrent(X, WEIGHTS, random(1, 3, N), None, SIZES - 1, **CELL), "batch_sizes: .* got 0 at step 1"),
    (lambda: ops.recurrent(X, WEIGHTS, random(1, 3, N), None, SIZES.int(), **CELL), "batch_sizes: .* got int32"),
    (
        lambda: ops.recurrent(X, WEIGHTS, random(1, 3, N), None, torch.tensor([1, 2]), **CELL),
        "batch_sizes: expected positive sizes that never grow .* got 2 at step 1",
    ),
]
