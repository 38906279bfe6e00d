"""A float64 reference of recurrent layers, step by step, with a bound on the error of every state.

It rounds where the operator does: the input, and the hidden state on its way into the next product, to the weight's
dtype. Bounds are carried along: through products by the weight's magnitudes, through gates by their slopes, and where a
state within its bound may round to another value, that value's distance is the new bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.reference import SMALLEST_NORMAL, TRANSCENDENTAL_ABSOLUTE, TRANSCENDENTAL_RELATIVE, U32, Estimate, rounded

Tensor = torch.Tensor


@dataclass(frozen=True)
class Bounded:
    """A value, and how far from it an fp32 computation may be."""

    value: Tensor
    error: Tensor

    def __add__(self, other: Bounded) -> Bounded:
        return fp32(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Bounded) -> Bounded:
        return fp32(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Bounded) -> Bounded:
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return fp32(self.value * other.value, error)

    def __getitem__(self, index: object) -> Bounded:
        return Bounded(self.value[index], self.error[index])  # type: ignore[index]

    def chunk(self, count: int) -> list[Bounded]:
        parts = zip(self.value.chunk(count, -1), self.error.chunk(count, -1), strict=True)
        return [Bounded(*part) for part in parts]

    def stored(self, dtype: torch.dtype) -> Bounded:
        value, low, high = (
            rounded(x, dtype, 1.0, 0) for x in (self.value, self.value - self.error, self.value + self.error)
        )
        return Bounded(value, torch.maximum(high - value, value - low))

    def estimate(self) -> Estimate:
        unknown = ~self.error.isfinite()  # of relus, whose bounds may grow with each step
        return Estimate(self.value, self.error.nan_to_num(), torch.zeros_like(unknown), unknown)


def exact(x: Tensor) -> Bounded:
    return Bounded(x.double(), torch.zeros_like(x, dtype=torch.float64))


def fp32(value: Tensor, error: Tensor) -> Bounded:
    """The result of one operation in fp32 (of a fused one of two) on operands of such an error."""
    return Bounded(value, error * (1 + 2 * U32) + 2 * U32 * value.abs() + SMALLEST_NORMAL)


def function(x: Bounded, of: str) -> Bounded:
    value = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}[of](x.value)
    if of == "relu":
        return Bounded(value, x.error)
    slope, range_ = (0.25, 1.0) if of == "sigmoid" else (1.0, 2.0)
    approximation = TRANSCENDENTAL_RELATIVE * value.abs() + TRANSCENDENTAL_ABSOLUTE
    return Bounded(value, (slope * x.error).clamp(max=range_) + approximation)


def product(x: Bounded, weight: Tensor, bias: Tensor | None) -> Bounded:
    """A GEMM of stored values; `weight` is rounded already."""
    terms = weight.shape[1] + 4
    magnitude = (x.value.abs() + x.error) @ weight.abs().T
    error = x.error @ weight.abs().T + terms * U32 / (1 - terms * U32) * magnitude + terms * SMALLEST_NORMAL
    if bias is None:
        return Bounded(x.value @ weight.T, error)
    return Bounded(x.value @ weight.T, error) + exact(bias)


@dataclass
class Direction:
    """Weights in the dtype that they are packed in."""

    input_weight: Tensor
    hidden_weight: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None = None


def next_state(cell: str, of_input: Bounded, of_hidden: Bounded, state: Bounded) -> tuple[Bounded, Bounded]:
    """The hidden state, and what is kept besides: an LSTM's cells, or a GRU's hidden state unrounded."""
    if cell == "lstm":
        sums = (of_input + of_hidden).chunk(4)
        enter, forget, leave = (function(sums[gate], "sigmoid") for gate in (0, 1, 3))
        kept = forget * state + enter * function(sums[2], "tanh")
        return leave * function(kept, "tanh"), kept
    if cell == "gru":
        inputs, hiddens = of_input.chunk(3), of_hidden.chunk(3)
        reset, update = (function(inputs[gate] + hiddens[gate], "sigmoid") for gate in (0, 1))
        fresh = function(inputs[2] + reset * hiddens[2], "tanh")
        hidden = update * (state - fresh) + fresh
        return hidden, hidden
    return function(of_input + of_hidden, cell.removeprefix("rnn_")), state


def run_direction(
    cell: str,
    steps: list[Bounded],
    weights: Direction,
    hidden: Tensor,
    state: Tensor | None,
    backward: bool,
) -> tuple[list[Bounded], Bounded, Bounded]:
    """`steps`: the input of each, of the sequences that last so long, which are the first. The outputs of each step,
    and the last hidden and cell state of each sequence."""
    dtype = weights.hidden_weight.dtype
    input_weight, hidden_weight = weights.input_weight.double(), weights.hidden_weight.double()
    hidden_now, kept = exact(hidden), exact(hidden if state is None else state)
    outputs: list[Bounded | None] = [None] * len(steps)
    for step in reversed(range(len(steps))) if backward else range(len(steps)):
        count = len(steps[step].value)
        of_input = product(steps[step].stored(weights.input_weight.dtype), input_weight, weights.input_bias)
        of_hidden = product(hidden_now[:count].stored(dtype), hidden_weight, weights.hidden_bias)
        made, kept_made = next_state(cell, of_input, of_hidden, kept[:count])
        if weights.projection is not None:
            made = product(made.stored(weights.projection.dtype), weights.projection.double(), None)
        hidden_now, kept = over(hidden_now, made), over(kept, kept_made)
        outputs[step] = made
    return [output for output in outputs if output is not None], hidden_now, kept


def over(all_rows: Bounded, first_rows: Bounded) -> Bounded:
    count = len(first_rows.value)
    return Bounded(
        torch.cat([first_rows.value, all_rows.value[count:]]), torch.cat([first_rows.error, all_rows.error[count:]])
    )


def beside(one: Bounded, other: Bounded) -> Bounded:
    return Bounded(torch.cat([one.value, other.value], -1), torch.cat([one.error, other.error], -1))
