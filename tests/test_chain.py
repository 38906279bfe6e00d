"""torch.ops.xopt.chain against the single operators, and the programs that call it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import xopt
from tests.test_runtime import not_when_sanitized
from xopt import _C
from xopt.modules.chain import Value
from xopt.ops.chain import Given, Result, call_text, calls_text
from xopt.ops.fakes import FLOATING

ops: Any = torch.ops.xopt

# ---- The operator ----------------------------------------------------------------------------------------------------


class Calls:
    """The arguments of a chain that grows call by call, and what single convolutions give."""

    def __init__(self, *values: Tensor) -> None:
        self.tensors = list(values)
        self.lines: list[str] = []
        self.results: list[Tensor] = []

    def add(self, input: Value, weight: Tensor, other: Value | None = None, groups: int = 1, **options: Any) -> None:
        dims = weight.dim() - 2
        packed, bias, scale = (
            self.given(tensor)
            for tensor in (ops.conv_pack(weight, groups, dtype=weight.dtype), options.get("bias"), options.get("scale"))
        )
        geometry = {name: options.get(name, [1] * dims) for name in ("stride", "dilation")}
        geometry["padding"] = options.get("padding", [0] * (2 * dims))
        fused = {name: options.get(name, 0.0) for name in ("alpha", "beta")}
        fused |= {name: options.get(name, "none") for name in ("activation", "binary")}
        named: dict[str, Any] = {**geometry, **fused, "groups": groups}
        named |= {"activation_last": options.get("activation_last", False)}
        named |= {"out_dtype": options.get("out_dtype", torch.float32)}
        tensors = {"input": input, "packed": packed, "bias": bias, "scale": scale, "other": other}
        self.call("conv", weight_size=list(weight.shape), **tensors, **named)

    def call(self, op: str, **named: Any) -> None:
        """A call of any operator, by its arguments' names."""
        called = getattr(ops, op).default
        names = [argument.name for argument in called._schema.arguments]
        self.lines.append(call_text(op, [named[name] for name in names]))
        self.results.append(called(**{name: self.value(value) for name, value in named.items()}))

    def given(self, tensor: Tensor | None) -> Given | None:
        if tensor is None:
            return None
        self.tensors.append(tensor)
        return Given(len(self.tensors) - 1)

    def value(self, value: Any) -> Any:
        if isinstance(value, Given):
            return self.tensors[value.place]
        return self.results[value.number] if isinstance(value, Result) else value

    def arguments(self, returned: Sequence[int]) -> tuple[list[Tensor], str]:
        return self.tensors, calls_text(self.lines, [Result(number) for number in returned])


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1).to(dtype)


def random_calls(seed: int, variant: int = 0) -> Calls:
    """A chain of up to five links in 1 to 3 dimensions that keep the image's size, so that any two can be added."""
    torch.manual_seed(seed + variant)
    draw = random.Random(seed)
    dims, channels, dtype = draw.choice((1, 2, 3)), draw.choice((1, 8, 33)), draw.choice(FLOATING)
    x = image(draw.choice((1, 2)), channels, *(draw.choice((1, 5, 9)) for _ in range(dims)), dtype=dtype)
    calls = Calls(x)
    for link in range(draw.choice((1, 3, 5))):
        values: list[Value] = [Given(0), *(Result(before) for before in range(link))]
        kernel, groups = draw.choice((1, 3)), draw.choice((1, channels))
        weight = (torch.randn(channels, channels // groups, *[kernel] * dims) / (channels * kernel)).to(dtype)
        options: dict[str, Any] = {
            "padding": [kernel // 2] * (2 * dims),
            "out_dtype": draw.choice((dtype, FLOATING[0])),
        }
        if draw.random() < 0.5:
            options |= {"bias": torch.randn(channels)}
        if draw.random() < 0.5:
            options |= {"scale": torch.randn(channels)}
        if draw.random() < 0.5:
            options |= {"activation": "clamp", "alpha": -0.5, "beta": 0.25}
        if draw.random() < 0.5:
            earlier = draw.choice(values)
            options |= {"other": earlier, "binary": draw.choice(("add", "mul")), "activation_last": draw.random() < 0.5}
        calls.add(draw.choice(values), weight, groups=groups, **options)
    return calls


@pytest.mark.sanitize
@pytest.mark.parametrize("seed", range(60))
def test_a_chain_gives_what_single_convolutions_give(seed: int) -> None:
    calls = random_calls(seed)
    wanted = sorted(random.Random(seed).sample(range(len(calls.lines)), min(2, len(calls.lines))))
    results = ops.chain(*calls.arguments(wanted))
    for number, result in zip(wanted, results, strict=True):
        assert result.dtype == calls.results[number].dtype
        assert result.stride() == calls.results[number].stride()
        assert torch.equal(result.nan_to_num(), calls.results[number].nan_to_num())


def forget_kept_outputs() -> None:
    xopt.runtime.keep_outputs(0)
    xopt.runtime.keep_outputs(256 << 20)


@not_when_sanitized
def test_what_no_later_link_reads_is_freed() -> None:
    """Of eight images of 16 MB, three are enough at a time: the others lie where an earlier one was."""
    calls = Calls(image(1, 16, 512, 512))
    for link in range(8):
        calls.add(Result(link - 1) if link else Given(0), torch.randn(16, 16, 1, 1))
    arguments = calls.arguments([7])
    calls.results.clear()
    forget_kept_outputs()
    before = _C.output_statistics()
    (result,) = ops.chain(*arguments)
    after = _C.output_statistics()
    assert result.shape == (1, 16, 512, 512)
    assert after[2] - before[2] >= 8  # more where convolutions are planned together and then not done so
    assert 1 <= after[3] - before[3] <= 3
    assert after[0] - before[0] == result.nbytes
    del result
    before = _C.output_statistics()
    ops.chain(*arguments)
    assert _C.output_statistics()[2] - before[2] == 8  # now that it is known which are done together


def test_other_operators_of_a_chain() -> None:
    torch.manual_seed(0)
    calls = Calls(image(2, 8, 9, 9))
    calls.add(Given(0), torch.randn(8, 8, 3, 3), bias=torch.randn(8))
    window = {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
    calls.call("pool", input=Result(0), kind="max", **window, ceil_mode=True, count_include_pad=False, divisor=0)
    rows = calls.given(torch.randn(2, 3, 8))
    packed = calls.given(ops.linear_pack(torch.randn(5, 8), dtype=torch.float32))
    fused = {"activation": "relu", "alpha": 0.0, "beta": 0.0, "binary": "none", "other": None, "activation_last": False}
    calls.call(
        "linear", input=rows, packed=packed, out_features=5, bias=None, **fused, out_dtype=torch.bfloat16,
        output_scale=1.0, output_zero_point=0, first_column=0, scale=None,
    )  # fmt: skip
    for result, number in zip(ops.chain(*calls.arguments([1, 2])), (1, 2), strict=True):
        assert torch.equal(result, calls.results[number])


def test_a_result_may_be_returned_twice_and_in_any_order() -> None:
    calls = random_calls(2)
    first, second, third = ops.chain(*calls.arguments([1, 0, 1]))
    assert torch.equal(first, third)
    assert torch.equal(first.nan_to_num(), calls.results[1].nan_to_num())
    assert torch.equal(second.nan_to_num(), calls.results[0].nan_to_num())


def products(dtype: torch.dtype, rows: int, width: int, *between: str) -> Calls:
    """Two linear layers after each other, and what else reads what is between."""
    torch.manual_seed(0)
    calls = Calls(torch.randn(2, rows, 24).to(dtype))
    fused = {"activation": "relu", "alpha": 0.0, "beta": 0.0, "binary": "none", "activation_last": False}
    rest = {"bias": None, "out_dtype": dtype, "output_scale": 1.0, "output_zero_point": 0, "first_column": 0}

    def linear(input: Value, inputs: int, outputs: int, other: Value | None = None) -> None:
        packed = calls.given(ops.linear_pack((torch.randn(outputs, inputs) / inputs**0.5).to(dtype), dtype=dtype))
        after = fused | {"other": other} | ({"binary": "add"} if other is not None else {})
        calls.call("linear", input=input, packed=packed, out_features=outputs, **after, **rest, scale=None)

    linear(Given(0), 24, width)
    linear(Result(0), width, 40)
    if "two products" in between:
        linear(Result(0), width, 8)
    if "gated" in between:
        halves = [(torch.randn(width, 40) / 7).to(dtype) for _ in range(2)]
        packed = calls.given(ops.linear_pack_gated(*halves, dtype=dtype))
        calls.call(
            "linear_gated", input=Result(1), packed=packed, out_features=width, gate_bias=None, up_bias=None,
            activation="silu", alpha=0.0, beta=0.0, out_dtype=dtype,
        )  # fmt: skip
        linear(Result(2), width, 8)
    if "sum" in between:
        linear(Result(0), width, width, Result(0))
    return calls


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("rows", [0, 1, 35])
@pytest.mark.parametrize("between", [(), ("two products",), ("sum",), ("gated",)])
def test_products_after_each_other(dtype: torch.dtype, rows: int, between: tuple[str, ...]) -> None:
    """Their rows are a multiple of 2 KB long, and may have a line between them where only products read them."""
    calls = products(dtype, rows, 4096 // dtype.itemsize, *between)
    last = len(calls.results) - 1
    for returned in ([1, last], [0, 1], [0, last]):
        for number, result in zip(returned, ops.chain(*calls.arguments(returned)), strict=True):
            assert result.is_contiguous()
            assert torch.equal(result, calls.results[number])


@not_when_sanitized
@pytest.mark.parametrize(
    ("between", "returned", "mebibytes"), [((), 1, 10), (("two products",), 2, 10), (("sum",), 2, 8)]
)
def test_which_rows_have_a_line_between_them(between: tuple[str, ...], returned: int, mebibytes: int) -> None:
    """Blocks of large outputs are multiples of 2 MB; what is between takes 8 without such lines."""
    calls = products(torch.float32, 512, 2048, *between)
    arguments = calls.arguments([returned])
    calls.results.clear()
    forget_kept_outputs()
    result = ops.chain(*arguments)
    kept = _C.output_statistics()[1]
    del result
    assert kept == mebibytes << 20


GOOD = "conv %0 %1 [4,4,1,1] %2 [1,1] [0,0,0,0] [1,1] 1 - none 0.0 0.0 none - false float32\nreturn $0"
BAD = {
    "place of no tensor": ("%2", "%3", "expected places of the 3 tensors, got %3"),
    "no place": ("%2", "%-2", "expected the place of a tensor below [0-9]+, got %-2"),
    "later result": ("%0", "$0", "expected the number of an earlier call below 0, got \\$0"),
    "no operator": ("conv", "convolution", "expected the name of an operator for chains, got 'convolution'"),
    "too few arguments": (" false float32", "", "expected more than 14 arguments of conv"),
    "no arguments": ("conv %0", "conv\nconv $0", "expected more than 0 arguments of conv"),
    "no tensor before another call": ("conv %0", "conv -\nconv $0", "expected a tensor for argument 1 of conv, got -"),
    "two spaces": ("conv ", "conv  ", "expected one space between the arguments of conv"),
    "no list": ("[1,1] 1", "1 1", "expected a list of integers for argument 7 of conv, got 1"),
    "list of words": ("[1,1] 1", "[1,a] 1", r"expected a list of integers, got \[1,a\]"),
    "open list": ("[1,1] 1", "[1,1 1", r"expected a list of integers, got \[1,1"),
    "open and nothing": ("[1,1] 1", "[ 1", r"expected a list of integers, got \["),
    "no list of tensors": ("conv %0", "concat %0 0\nconv $0", "expected an integer for argument 1 of concat, got %0"),
    "list of no tensors": ("conv %0", "concat () 0\nconv $0", r"expected a list of tensors, .* got \(\)"),
    "list with a number": ("conv %0", "concat (%0,5) 0\nconv $0", r"expected a list of tensors, .* got \(%0,5\)"),
    "open list of tensors": ("conv %0", "concat (%0 0\nconv $0", r"expected a list of tensors, .* got \(%0"),
    "more tensors than there are": ("conv %0", "concat 99 %0 0\nconv $0", "expected a tensor for argument 3 of concat"),
    "None": ("%0", "-", "expected a tensor for argument 1 of conv, got -"),
    "boolean": ("false", "0", "expected a boolean for argument 15 of conv, got 0"),
    "dtype": ("float32", "floating", "expected the name of a dtype of conv, got floating"),
    "no return": ("\nreturn $0", "", "expected a last line 'return"),
    "returned tensor": ("return $0", "return %0", "expected results to return"),
    "later returned": ("return $0", "return $1", "expected the number of a call below 1"),
    "nothing": (GOOD, "", "expected a last line 'return"),
    "activation": ("none 0.0", "swoosh 0.0", "activation: expected .*, got 'swoosh'"),
    "channels": ("[4,4,1,1]", "[4,3,1,1]", "input: expected 3 channels"),
    "stride": ("%2 [1,1]", "%2 [0,1]", "stride: expected"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    written, instead, message = BAD[name]
    tensors = [image(1, 4, 5, 5), ops.conv_pack(torch.randn(4, 4, 1, 1), dtype=torch.float32), torch.randn(4)]
    assert len(ops.chain(tensors, GOOD)) == 1
    with pytest.raises(RuntimeError, match=f"xopt::(chain: calls|conv): {message}"):
        ops.chain(tensors, GOOD.replace(written, instead))
