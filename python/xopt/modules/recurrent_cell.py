"""nn.LSTMCell, nn.GRUCell and nn.RNNCell with packed weights: a single step of `torch.ops.xopt.recurrent`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from xopt.graph.symbol import is_symbolic, recorder_of
from xopt.modules.base import Replacement
from xopt.modules.pattern import step
from xopt.modules.recurrent import Recurrent, can_compute, cell_of, operands, output_dtype

_recurrent = torch.ops.xopt.recurrent.default


class Cell(Recurrent):
    input_size: int
    hidden_size: int
    bias: bool

    def forward(self, input: Any, hx: Any = None) -> Any:
        if is_symbolic((input, hx), {}):
            return recorder_of(input, hx).call_module(self, recurrent_cell, input, hx)
        return recurrent_cell(self, input, hx)


@step("")
def recurrent_cell(module: Cell, input: Tensor, hx: Any = None) -> Any:
    cell = cell_of(module)
    states = () if hx is None else (tuple(hx) if cell == "lstm" else (hx,))
    expected = (*input.shape[:-1], module.hidden_size)
    if (
        not can_compute(module, (input, *states))
        or input.dim() not in (1, 2)
        or input.numel() == 0
        or input.shape[-1] != module.input_size
        or any(tuple(state.shape) != expected for state in states)
    ):
        return module.source.forward(module.plain_module(input.dtype), input, hx)
    rows = (1, -1)
    _, *results = _recurrent(
        input.reshape(*rows, module.input_size),
        operands(module),
        *(*(state.reshape(*rows, module.hidden_size) for state in states), None, None)[:2],
        cell=cell,
        hidden_size=module.hidden_size,
        bias=module.bias,
        out_dtype=output_dtype(cell, (input, *states), of_a_cell=True),
    )
    if cell == "lstm":
        return tuple(result.reshape(expected) for result in results)
    return results[0].reshape(expected)


class PackedLSTMCell(Cell, Replacement, nn.LSTMCell):
    source: ClassVar[type[nn.Module]] = nn.LSTMCell


class PackedGRUCell(Cell, Replacement, nn.GRUCell):
    source: ClassVar[type[nn.Module]] = nn.GRUCell


class PackedRNNCell(Cell, Replacement, nn.RNNCell):
    source: ClassVar[type[nn.Module]] = nn.RNNCell
