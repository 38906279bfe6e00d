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
    leading = 3 - input.dim()  # a step of one sequence, or of several
    x, *states_before = (_with_leading(tensor, leading) for tensor in (input, *states))
    _, hidden, cell_state = _recurrent(
        x,
        operands(module),
        *(*states_before, None, None)[:2],
        cell=cell,
        hidden_size=module.hidden_size,
        bias=module.bias,
        out_dtype=output_dtype(cell, (input, *states), of_a_cell=True),
    )
    results = (hidden, cell_state) if cell == "lstm" else (hidden,)
    results = tuple(result[0] if leading == 1 else result[0, 0] for result in results)
    return results if cell == "lstm" else results[0]


def _with_leading(tensor: Tensor, dims: int) -> Tensor:
    return tensor.unsqueeze(0) if dims == 1 else tensor[None, None]


class PackedLSTMCell(Cell, Replacement, nn.LSTMCell):
    source: ClassVar[type[nn.Module]] = nn.LSTMCell


class PackedGRUCell(Cell, Replacement, nn.GRUCell):
    source: ClassVar[type[nn.Module]] = nn.GRUCell


class PackedRNNCell(Cell, Replacement, nn.RNNCell):
    source: ClassVar[type[nn.Module]] = nn.RNNCell
