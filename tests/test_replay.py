"""Chains that are run again as they were noted: the same results as of single operators, wherever tensors lie by then.

Sizes that come for the first time are not noted, and the second time they are; so a third run is the first that shows
anything. Each run has tensors of its own, and what earlier ones read is spoiled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import contracts
from tests.contracts.operands import Call
from tests.test_chain import image
from tests.test_chain_views import VIEWS, arguments_of, layer_calls, random_tensor
from xopt import _C
from xopt.ops.chain import Given, Result, call_text, calls_text
from xopt.ops.views import view_of

ops: Any = torch.ops.xopt
CHAINABLE = (
    "linear",
    "linear_gated",
    "linear_norm",
    "layer_norm",
    "rms_norm",
    "attention",
    "rotary",
    "concat",
    "combine",
    "pointwise",
    "matmul",
    "softmax",
)
IMAGES = ("conv", "pool", "adaptive_pool", "batch_norm", "group_norm", "upsample")
RUNS = 4


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Under grad mode nothing is run again: each call looks whether a gradient is wanted."""
    with torch.no_grad():
        yield


def elsewhere(tensor: Tensor) -> Tensor:
    """The same values in the same layout."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def spoil(tensor: Tensor) -> None:
    """Values that nobody can have read without its being seen; packed weights keep what says that they are some."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.uint8 and tensor.dim() == 1:
        tensor[64:].fill_(255)


def changed(tensor: Tensor, run: int) -> Tensor:
    """Other values for each run, of floats that no weight is packed from."""
    return elsewhere(tensor * (1 + run / 4)) if tensor.is_floating_point() else elsewhere(tensor)


class Program:
    """Calls of a chain, and what they are one by one."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.lines: list[str] = []
        self.steps: list[Callable[[list[Tensor], list[Any]], Any]] = []

    def add(self, op: str, *arguments: Any) -> int:
        function: Any = view_of(op) if op in VIEWS else getattr(ops, op).default
        names = [] if op in VIEWS else [each for each in function._schema.arguments if each.kwarg_only]

        def step(tensors: list[Tensor], results: list[Any]) -> Any:
            def value(argument: Any) -> Any:
                if isinstance(argument, Given):
                    return tensors[argument.place]
                if isinstance(argument, Result):
                    return results[argument.number][argument.part]
                return [value(each) for each in argument] if type(argument) is tuple else argument

            values = [value(argument) for argument in arguments]
            count = len(values) - len(names)
            named = {name.name: each for name, each in zip(names, values[count:], strict=True)}
            result = function(*values[:count], **named)
            return result if isinstance(result, tuple) else (result,)

        self.lines.append(call_text(op, arguments))
        self.steps.append(step)
        return len(self.steps) - 1

    def results(self, tensors: list[Tensor]) -> list[Any]:
        results: list[Any] = []
        for step in self.steps:
            results.append(step(tensors, results))
        return results

    def check(self, returned: list[Result], runs: int = RUNS) -> int:
        """Returns how many calls of the last run were noted ones."""
        text = calls_text(self.lines, returned)
        earlier: list[Tensor] = []
        replayed = 0
        for run in range(runs):
            tensors = [changed(tensor, run) for tensor in self.tensors]
            wanted = self.results(tensors)
            before = _C.replayed_calls()
            results = ops.chain(tensors, text)
            replayed = _C.replayed_calls() - before
            for result, each in zip(results, returned, strict=True):
                expected = wanted[each.number][each.part]
                assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
                assert torch.equal(result.nan_to_num(), expected.nan_to_num())
            for tensor in earlier:
                spoil(tensor)
            earlier = tensors
        return replayed


def alone(op: str, call: Call) -> Program:
    """A chain of one call."""
    positional, named = call
    schema = getattr(ops, op).default._schema
    values = dict(zip([each.name for each in schema.arguments], positional, strict=False)) | named
    program = Program([])

    def given(value: Any) -> Any:
        if isinstance(value, list) and isinstance(value[0], Tensor):
            return tuple(map(given, value))
        if not isinstance(value, Tensor):
            return value
        program.tensors.append(value)
        return Given(len(program.tensors) - 1)

    program.add(op, *[given(values.get(each.name, each.default_value)) for each in schema.arguments])
    return program


def is_read_in_place(call: Call) -> bool:
    """Whether nothing of a sample is empty, or has to be copied before a kernel can read it."""
    lists = [each if isinstance(each, list) else [each] for each in (*call[0], *call[1].values())]
    tensors = [each for items in lists for each in items if isinstance(each, Tensor)]
    channels_last = [each.movedim(1, -1) if each.dim() > 2 else each for each in tensors]
    pairs = zip(tensors, channels_last, strict=True)
    return all(each.numel() > 0 and (each.is_contiguous() or last.is_contiguous()) for each, last in pairs)


@pytest.mark.sanitize
@pytest.mark.parametrize("op", CHAINABLE + IMAGES)
def test_each_operator(op: str) -> None:
    noted = 0
    for call in contracts.samples_of(op):
        returned = [Result(0, part) for part in range(len(getattr(ops, op).default._schema.returns))]
        replayed = alone(op, call).check(returned)
        assert replayed <= 1
        if op not in IMAGES and is_read_in_place(call):
            assert replayed == 1
        noted += replayed
    assert noted > 0


@pytest.mark.sanitize
@pytest.mark.parametrize("op", VIEWS)
@pytest.mark.parametrize("seed", range(12))
def test_views_between(op: str, seed: int) -> None:
    """Of a result, and of what is given; a view that has to be a copy is made as it was."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    x = random_tensor(draw, least=2 if op in ("select", "squeeze") else 1)
    program = Program([x])
    first: Any = Given(0)
    if seed % 2:
        first = Result(program.add("layer_norm", Given(0), None, None, 1e-5, None, False, None))
        x = x.contiguous()
    view = program.add(op, first, *arguments_of(draw, op, x))
    last = program.add("layer_norm", Result(view), None, None, 1e-5, Result(view), True, torch.float32)
    program.check([Result(last), Result(last, 1)])
    program.check([Result(last, 1), Result(view)])


def hidden_program(seed: int) -> tuple[Program, list[int]]:
    """Layers of all kinds on [sequences, tokens, features], and the calls whose results have that shape."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    dtype = draw.choice((torch.float32, torch.bfloat16))
    sequences, tokens, heads, depth = draw.choice((1, 2)), draw.choice((1, 5, 40)), 2, draw.choice((16, 32))
    features = heads * depth
    shape = (sequences, tokens, features)
    program = Program([torch.randn(shape).to(dtype)])

    def given(tensor: Tensor) -> Given:
        program.tensors.append(tensor)
        return Given(len(program.tensors) - 1)

    def weight(rows: int, columns: int) -> Given:
        return given(ops.linear_pack(torch.randn(rows, columns) / columns**0.5, dtype=dtype))

    def linear(x: Any, out: int, columns: int = features, other: Any = None) -> int:
        binary = "none" if other is None else "add"
        bias = given(torch.randn(out)) if draw.random() < 0.5 else None
        activation = draw.choice(("none", "gelu_erf", "relu"))
        return program.add(
            *("linear", x, weight(out, columns), out, bias, activation, 0.0, 0.0, binary, other, False, dtype, 1.0, 0),
            *(0, None),
        )

    hidden: list[int] = []
    value: Any = Given(0)
    for _ in range(draw.choice((2, 4, 7))):
        other = Result(draw.choice(hidden)) if hidden and draw.random() < 0.5 else Given(0)
        kind = draw.choice(("linear", "gated", "norm", "layer_norm", "attention", "copy", "rows"))
        if kind == "linear":
            hidden.append(linear(Result(linear(value, 96)), features, 96, other))
        elif kind == "gated":
            pair = given(ops.linear_pack_gated(torch.randn(48, features), torch.randn(48, features), dtype=dtype))
            gated = program.add("linear_gated", value, pair, 48, None, None, "silu", 0.0, 0.0, dtype)
            hidden.append(linear(Result(gated), features, 48))
        elif kind == "norm":
            square = weight(features, features)
            named = ("rms_norm", given(torch.rand(features)), None, 1e-5, dtype, True)
            hidden.append(program.add("linear_norm", value, square, features, None, other, *named))
            value = Result(hidden[-1], 1)
            continue
        elif kind == "layer_norm":
            hidden.append(program.add("layer_norm", value, None, None, 1e-5, other, True, dtype))
        elif kind == "attention":
            merged = linear(value, 3 * features)
            parts = [program.add("narrow", Result(merged), -1, place * features, features) for place in range(3)]
            split = [program.add("reshape", Result(part), [sequences, tokens, heads, -1]) for part in parts]
            q, k, v = (Result(program.add("transpose", Result(each), 1, 2)) for each in split)
            attended = program.add(
                "attention", q, k, v, None, None, draw.random() < 0.5, 0, 0, draw.random() < 0.5, None
            )
            hidden.append(program.add("reshape", Result(attended), list(shape)))
        elif kind == "copy":  # which is no view
            turned = program.add("transpose", value, 1, 2)
            together = program.add("contiguous", Result(turned))
            hidden.append(program.add("reshape", Result(together), list(shape)))
        else:
            flat = program.add("flatten", value, 0, 1)
            hidden.append(program.add("unflatten", Result(linear(Result(flat), features)), 0, [sequences, tokens]))
        value = Result(hidden[-1])
    return program, hidden


@pytest.mark.sanitize
@pytest.mark.parametrize("seed", range(60))
def test_programs(seed: int, torch_threads: None) -> None:
    program, hidden = hidden_program(seed)
    torch.set_num_threads(1 + seed % 3)
    draw = random.Random(seed)
    assert program.check([Result(hidden[-1])]) > 0
    program.check([Result(each) for each in draw.sample(hidden, draw.randint(1, len(hidden)))])


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(60, 3000))
def test_many_programs(seed: int) -> None:
    program, hidden = hidden_program(seed)
    program.check([Result(each) for each in random.Random(seed).sample(hidden, 1)])


def test_a_layer_is_noted_as_a_whole() -> None:
    tensors, text = layer_calls()
    for _ in range(3):
        before = _C.replayed_calls()
        ops.chain([elsewhere(tensor) for tensor in tensors], text)
    assert _C.replayed_calls() - before == 3  # the merged product, attention, and the product with the norm


def test_between_results_that_others_read() -> None:
    """A convolution, whose image becomes tokens, and a product of these."""
    weight, square = torch.randn(32, 3, 4, 4), torch.randn(48, 32)
    packed = ops.conv_pack(weight, dtype=torch.float32)
    program = Program([image(2, 3, 16, 16), packed, ops.linear_pack(square, dtype=torch.float32)])
    geometry = ([32, 3, 4, 4], None, [4, 4], [0] * 4, [1, 1], 1, None)
    conv = program.add("conv", Given(0), Given(1), *geometry, "none", 0.0, 0.0, "none", None, False, torch.float32)
    flat = program.add("flatten", Result(conv), 2, -1)
    tokens = program.add("transpose", Result(flat), 1, 2)
    named = ("none", 0.0, 0.0, "none", None, False, torch.float32, 1.0, 0, 0, None)
    last = program.add("linear", Result(tokens), Given(2), 48, None, *named)
    assert program.check([Result(last)]) == 2
    assert program.check([Result(last), Result(tokens)]) == 2


class Growing:
    """Layers of a decoder, [one text, one word, features], whose caches are longer in each step."""

    HEADS, DEPTH = 2, 16
    made = 0

    def __init__(self, seed: int, layers: int) -> None:
        torch.manual_seed(seed)
        Growing.made += 1
        eps = 1e-5 + Growing.made * 1e-7  # a text of its own, which has no recordings
        features = self.HEADS * self.DEPTH
        self.program = Program([torch.randn(1, 1, features)])
        self.layers = layers
        program = self.program
        hidden: Any = Given(0)
        self.caches = [self.given(torch.randn(1, self.HEADS, 3, self.DEPTH)) for _ in range(2 * layers)]
        self.returned: list[Result] = []
        for layer in range(layers):
            merged = self.linear(hidden, 3 * features)
            parts = [program.add("narrow", Result(merged), -1, place * features, features) for place in range(3)]
            heads = [program.add("reshape", Result(part), [1, 1, self.HEADS, -1]) for part in parts]
            query, *new = (Result(program.add("transpose", Result(each), 1, 2)) for each in heads)
            pair = self.caches[2 * layer : 2 * layer + 2]
            longer = [Result(program.add("concat", (old, each), -2)) for old, each in zip(pair, new, strict=True)]
            attended = program.add("attention", query, *longer, None, None, True, 0, 0, True, None)
            flat = program.add("flatten", Result(attended), 2, -1)
            normed = program.add("layer_norm", Result(flat), None, None, eps, hidden, True, torch.float32)
            hidden = Result(self.linear(Result(normed), features))
            self.returned += longer
        self.returned.append(hidden)

    def given(self, tensor: Tensor) -> Given:
        self.program.tensors.append(tensor)
        return Given(len(self.program.tensors) - 1)

    def linear(self, x: Any, out: int) -> int:
        columns = self.HEADS * self.DEPTH
        packed = self.given(ops.linear_pack(torch.randn(out, columns) / columns**0.5, dtype=torch.float32))
        named = ("none", 0.0, 0.0, "none", None, False, torch.float32, 1.0, 0, 0, None)
        return self.program.add("linear", x, packed, out, None, *named)

    def step(self) -> int:
        """With other values, and the caches of the step before; returns how many calls were noted ones."""
        program = self.program
        tensors = [changed(each, 1) if each.dtype == torch.float32 else elsewhere(each) for each in program.tensors]
        wanted = program.results(tensors)
        before = _C.replayed_calls()
        results = ops.chain(tensors, calls_text(program.lines, self.returned))
        for result, each in zip(results, self.returned, strict=True):
            torch.testing.assert_close(result, wanted[each.number][each.part], atol=0, rtol=0)
        for tensor in tensors:
            spoil(tensor)
        for place, cache in enumerate(self.caches):
            program.tensors[cache.place] = results[place].clone()
        return _C.replayed_calls() - before


@pytest.mark.sanitize
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_what_grows_is_run_and_the_rest_is_noted(seed: int, layers: int) -> None:
    growing = Growing(seed, layers)
    noted = [growing.step() for _ in range(12)]
    assert noted == [0, 0, *[3 * layers] * 10]  # two products and the norm


@pytest.mark.sanitize
def test_another_text_begins_to_grow() -> None:
    growing = Growing(0, 2)
    assert [growing.step() for _ in range(4)] == [0, 0, 6, 6]
    for cache in growing.caches:
        growing.program.tensors[cache.place] = torch.randn(1, Growing.HEADS, 7, Growing.DEPTH)
    assert [growing.step() for _ in range(3)] == [6, 6, 6]


@pytest.mark.sanitize
def test_a_result_that_was_alike_in_two_runs_alone() -> None:
    """Values get deeper, and so does what attention gives, which the norm behind it was noted for."""
    program = Program([torch.randn(1, 1, 1, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8)])
    attended = program.add("attention", Given(0), Given(1), Given(2), None, None, False, 0, 0, False, None)
    results = [program.add("layer_norm", Result(attended), None, None, 1e-5, None, False, None)]
    for _ in range(3):
        results.append(program.add("layer_norm", Result(results[-1]), None, None, 1e-5, None, False, None))
    text = calls_text(program.lines, [Result(results[-1])])
    noted = []
    for keys, depth in ((3, 8), (4, 8), (5, 8), (6, 16), (7, 16), (7, 8)):
        tensors = [program.tensors[0], torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, depth)]
        before = _C.replayed_calls()
        (result,) = ops.chain(tensors, text)
        noted.append(_C.replayed_calls() - before)
        assert torch.equal(result, program.results(tensors)[results[-1]][0])
    assert noted[2] == noted[5] == 4


def test_sizes_that_never_come_again_are_not_noted() -> None:
    program = Program([torch.randn(1, 8), ops.linear_pack(torch.randn(8, 8), dtype=torch.float32)])
    named = ("none", 0.0, 0.0, "none", None, False, torch.float32, 1.0, 0, 0, None)
    program.add("linear", Given(0), Given(1), 8, None, *named)
    text = calls_text(program.lines, [Result(0)])
    before = _C.replayed_calls()
    for rows in range(1, 100):
        ops.chain([torch.randn(rows, 8), program.tensors[1]], text)
    assert _C.replayed_calls() == before
    for rows in (99, 99, 99):
        ops.chain([torch.randn(rows, 8), program.tensors[1]], text)
    assert _C.replayed_calls() > before
