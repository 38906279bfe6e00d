"""xopt::recurrent against a float64 reference that goes step by step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests import cases
from tests.cases import DTYPES
from tests.families import Family, expect_values
from tests.recurrent_reference import Bounded, Direction, beside, exact, run_direction
from xopt.modules.packed_parameter import PackedParameter

ops = torch.ops.xopt
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class RecurrentCase:
    seed: int = 0
    cell: str = "lstm"
    batch: int = 1
    steps: int = 1
    features: int = 1
    units: int = 1
    outputs: int = 0  # of an LSTM's projection; 0: none
    layers: int = 1
    bidirectional: bool = False
    bias: bool = True
    batch_first: bool = False
    lengths: bool = False  # packed sequences of different lengths
    packed: str = "f32"
    input: str = "f32"
    out: str = ""
    states: str = ""  # the dtype of the first states; "": none
    values: str = "normal"
    layout: str = "contiguous"


def sample(rng: random.Random) -> RecurrentCase:
    cell = rng.choice(("lstm", "lstm", "gru", "gru", "rnn_tanh", "rnn_relu"))
    units = rng.choice((1, 2, 5, 31, 32, 33, 64, 65, 100))
    lengths = rng.random() < 0.35
    return RecurrentCase(
        seed=rng.randrange(2**31),
        cell=cell,
        batch=rng.choice((1, 1, 2, 3, 4, 5, 8, 16, 17, 40)),
        steps=rng.choice((1, 1, 2, 3, 6)),
        features=rng.choice((1, 3, 16, 33, 70)),
        units=units,
        outputs=rng.choice((0, 0, 1, units, 20, 33)) if cell == "lstm" else 0,
        layers=rng.choice((1, 1, 1, 1, 2, 3)),
        bidirectional=rng.random() < 0.4,
        bias=rng.random() < 0.7,
        batch_first=not lengths and rng.random() < 0.4,
        lengths=lengths,
        packed=rng.choice(cases.FLOATS),
        input=rng.choice(cases.FLOATS),
        out=rng.choice(("", "", *cases.FLOATS)),
        states=rng.choice(cases.FLOATS if lengths else ("", *cases.FLOATS)),
        values=rng.choice(("normal", "normal", "normal", "zeros", "one_hot")),
        layout=cases.pick(rng, cases.INPUT_LAYOUTS),
    )


@dataclass
class Arguments:
    x: Tensor
    weights: list[Direction]  # of each layer and direction
    hidden: Tensor | None
    cell: Tensor | None
    batch_sizes: Tensor | None


def arguments(case: RecurrentCase) -> Arguments:
    generator = torch.Generator().manual_seed(case.seed)
    outputs, directions = case.outputs or case.units, 2 if case.bidirectional else 1
    batch_sizes = None
    shape: tuple[int, ...] = (case.steps, case.batch, case.features)
    if case.lengths:
        lengths = torch.randint(1, case.steps + 1, (case.batch,), generator=generator)
        batch_sizes = (lengths[:, None] > torch.arange(int(lengths.max()))).sum(0)
        shape = (int(lengths.sum()), case.features)
    elif case.batch_first:
        shape = (case.batch, case.steps, case.features)
    x = cases.tensor(case.values, shape, DTYPES[case.input], generator, case.layout)

    def drawn(*size: int, scale: float = 1.0, dtype: str = "f32") -> Tensor:
        return (torch.randn(size, generator=generator) * scale).to(DTYPES[dtype])

    rows, scale = GATES[case.cell] * case.units, 1 / math.sqrt(case.units)
    weights = []
    for number in range(case.layers * directions):
        features = case.features if number < directions else directions * outputs
        weights.append(
            Direction(
                drawn(rows, features, scale=1 / math.sqrt(features), dtype=case.packed),
                drawn(rows, outputs, scale=scale, dtype=case.packed),
                drawn(rows, scale=0.3) if case.bias else None,
                drawn(rows, scale=0.3, dtype="bf16") if case.bias else None,
                drawn(outputs, case.units, scale=scale, dtype=case.packed) if case.outputs else None,
            )
        )
    hidden = cell = None
    if case.states:
        count = case.layers * directions
        hidden = drawn(count, case.batch, outputs, dtype=case.states)
        cell = drawn(count, case.units, case.batch, dtype=case.states).mT if case.cell == "lstm" else None
    return Arguments(x, weights, hidden, cell, batch_sizes)


def packed(weights: list[Direction], cell: str) -> list[Tensor]:
    operands: list[Tensor] = []
    for each in weights:
        for weight in (each.input_weight, each.hidden_weight):
            operands.append(PackedParameter.pack(weight, weight.dtype, gates=GATES[cell]).packed)
        operands += [bias for bias in (each.input_bias, each.hidden_bias) if bias is not None]
        if each.projection is not None:
            operands.append(ops.linear_pack(each.projection, dtype=each.projection.dtype))
    return operands


def run(case: RecurrentCase, given: Arguments) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = ops.recurrent(
        given.x,
        packed(given.weights, case.cell),
        given.hidden,
        given.cell,
        given.batch_sizes,
        cell=case.cell,
        hidden_size=case.units,
        proj_size=case.outputs,
        num_layers=case.layers,
        bias=case.bias,
        bidirectional=case.bidirectional,
        batch_first=case.batch_first,
        out_dtype=DTYPES[case.out] if case.out else None,
    )
    return results


def expected(case: RecurrentCase, given: Arguments) -> tuple[list[Bounded], list[Bounded], list[Bounded]]:
    """The outputs of each step, and the last hidden states and cells of each layer and direction."""
    out_dtype, directions = DTYPES[case.out or case.input], 2 if case.bidirectional else 1
    if given.batch_sizes is not None:
        steps = [exact(part) for part in given.x.split(given.batch_sizes.tolist())]
    else:
        steps = [exact(part) for part in given.x.unbind(1 if case.batch_first else 0)]
    hiddens, cells = [], []
    for layer in range(case.layers):
        made = []
        for direction in range(directions):
            number = layer * directions + direction
            zeros = torch.zeros(case.batch, case.outputs or case.units), torch.zeros(case.batch, case.units)
            hidden = zeros[0] if given.hidden is None else given.hidden[number]
            cell = zeros[1] if given.cell is None else given.cell[number]
            state = cell if case.cell == "lstm" else None
            outputs, last, kept = run_direction(
                case.cell, steps, given.weights[number], hidden, state, backward=direction == 1
            )
            made.append(outputs)
            hiddens.append(last)
            cells.append(kept)
        steps = made[0] if directions == 1 else [beside(*pair) for pair in zip(*made, strict=True)]
        if layer + 1 < case.layers:
            steps = [step.stored(out_dtype) for step in steps]
    return steps, hiddens, cells


def joined(parts: list[Bounded], of: Callable[[list[Tensor]], Tensor]) -> Bounded:
    return Bounded(of([part.value for part in parts]), of([part.error for part in parts]))


def check(case: RecurrentCase) -> None:
    given = arguments(case)
    out, hidden, cell = run(case, given)
    steps, hiddens, cells = expected(case, given)
    dtype = DTYPES[case.out or case.input]
    all_steps = joined(steps, lambda parts: torch.cat(parts))
    if case.batch_first:
        all_steps = joined(steps, lambda parts: torch.stack(parts, 1).flatten(0, 1))
    width = all_steps.value.shape[-1]
    expect_values("the output", out, all_steps.estimate(), (*given.x.shape[:-1], width), dtype)
    last = joined(hiddens, torch.cat)
    expect_values("the hidden state", hidden, last.estimate(), (len(hiddens), case.batch, width_of(last)), dtype)
    if case.cell == "lstm":
        kept = joined(cells, torch.cat)
        expect_values("the cell state", cell, kept.estimate(), (len(cells), case.batch, case.units), dtype)
    elif cell.numel() != 0:
        raise AssertionError(f"a {case.cell} has a cell state of {tuple(cell.shape)}")


def width_of(x: Bounded) -> int:
    return x.value.shape[-1]


FAMILY = Family("recurrent", RecurrentCase, sample, check)


def test_cases(case_batch: list[RecurrentCase]) -> None:
    FAMILY.run_all(case_batch)


LARGE = {
    "one sequence": RecurrentCase(cell="lstm", batch=1, steps=9, features=70, units=300, bidirectional=True),
    "rows for each thread": RecurrentCase(cell="gru", batch=50, steps=9, features=20, units=70, layers=2),
    "many chunks": RecurrentCase(cell="lstm", batch=3, steps=150, features=5, units=40, bidirectional=True),
    "packed": RecurrentCase(cell="lstm", batch=40, steps=30, features=9, units=70, lengths=True, states="f32"),
    "projected": RecurrentCase(cell="lstm", batch=24, steps=7, features=9, units=130, outputs=70, batch_first=True),
}


@pytest.mark.sanitize  # where tiles are emulated: on their own machine few run this
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_results_do_not_depend_on_the_number_of_threads(name: str, dtype: str, torch_threads: None) -> None:
    case = RecurrentCase(**{**vars(LARGE[name]), "packed": dtype, "seed": 7})
    given = arguments(case)
    results = []
    for threads in (1, 2, 3, 5, 8):
        torch.set_num_threads(threads)
        results.append(run(case, given))
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))


@pytest.mark.parametrize("name", LARGE)
def test_long_sequences(name: str) -> None:
    """Of which bounds would say nothing: in fp32, against the same in float64."""
    case = LARGE[name]
    given = arguments(case)
    steps, hiddens, _ = expected(case, given)
    out, hidden, _ = run(case, given)
    value = torch.stack([step.value for step in steps], 1) if case.batch_first else None
    exact_out = torch.cat([step.value for step in steps]).reshape(out.shape) if value is None else value
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=2e-5)
    torch.testing.assert_close(hidden.double(), torch.stack([last.value for last in hiddens]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_special_sequence_stays_in_its_row(special: float) -> None:
    for cell in GATES:
        case = RecurrentCase(seed=3, cell=cell, batch=11, steps=4, features=9, units=40, layers=2)
        given = arguments(case)
        before = run(case, given)[0]
        given.x[1, 5, 2] = special
        after = run(case, given)[0]
        others = [row for row in range(case.batch) if row != 5]
        assert torch.equal(after[:, others], before[:, others])
        assert torch.equal(after[0], before[0])
        assert special == math.inf or not after[1:, 5].isfinite().any()


def test_nothing_to_do() -> None:
    case = RecurrentCase(batch=0, steps=3, features=5, units=7, layers=2, bidirectional=True)
    out, hidden, cell = run(case, arguments(case))
    assert out.shape == (3, 0, 14)
    assert hidden.shape == cell.shape == (4, 0, 7)
