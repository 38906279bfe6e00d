"""Views, second results and sizes in torch.ops.xopt.chain, against torch's methods and the single operators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from xopt.ops.chain import Computed, Given, Number, Result, SizeOf, call_text, calls_text, number_of
from xopt.ops.costs import COSTS
from xopt.ops.views import channels_last, contiguous_unless_channels_last, view_of

ops: Any = torch.ops.xopt

# What follows a view, so that a chain has a result of its own: it reads a tensor in whatever layout.
NORM = ("layer_norm", Result(0), None, None, 1e-5, None, False, torch.float32)


def through_a_chain(x: Tensor, op: str, *arguments: Any) -> Tensor:
    """The norm of a view."""
    text = calls_text([call_text(op, (Given(0), *arguments)), call_text(NORM[0], NORM[1:])], [Result(1)])
    (result,) = ops.chain([x], text)
    return result  # type: ignore[no-any-return]


def check(x: Tensor, op: str, *arguments: Any) -> None:
    function: Any = view_of(op)
    wanted, _ = ops.layer_norm(function(x, *arguments))
    result = through_a_chain(x, op, *arguments)
    assert result.shape == wanted.shape
    assert torch.equal(result, wanted)


def random_tensor(draw: random.Random, least: int = 1) -> Tensor:
    """Of up to five dimensions in any order, of which some are parts of larger ones, begun somewhere in memory."""
    sizes = [draw.choice((1, 2, 3, 4, 6)) for _ in range(draw.randint(least, 5))]
    order = draw.sample(range(len(sizes)), len(sizes))
    x = torch.randn([sizes[dim] + draw.choice((0, 0, 0, 2)) for dim in order])
    x = x[tuple(slice(x.shape[place] - sizes[dim], None) for place, dim in enumerate(order))]
    return x.permute([order.index(dim) for dim in range(len(sizes))])


def other_sizes(draw: random.Random, count: int) -> list[int]:
    """Of as many elements, with one left open now and then."""
    sizes: list[int] = []
    while math.prod(sizes) != count:
        rest = count // math.prod(sizes)
        sizes.append(draw.choice([size for size in range(1, rest + 1) if rest % size == 0]))
        if len(sizes) > 2:
            sizes[-1] *= count // math.prod(sizes)
    sizes = sizes or [1]
    if draw.random() < 0.5:
        sizes[draw.randrange(len(sizes))] = -1
    return sizes


def arguments_of(draw: random.Random, op: str, x: Tensor) -> tuple[Any, ...]:
    def dim() -> int:
        return draw.randrange(-x.dim(), x.dim())

    if op == "reshape":
        return (other_sizes(draw, x.numel()),)
    if op == "flatten":
        first = draw.randrange(x.dim())
        return first, draw.choice((draw.randrange(first, x.dim()), -1))
    if op == "unflatten":
        chosen = dim()
        return chosen, other_sizes(draw, x.shape[chosen])
    if op == "permute":
        return ([each - draw.choice((0, x.dim())) for each in draw.sample(range(x.dim()), x.dim())],)
    if op == "transpose":
        return dim(), dim()
    if op == "unsqueeze":
        return (draw.randrange(-x.dim() - 1, x.dim() + 1),)
    if op == "squeeze":
        return (dim(),)
    if op == "narrow":
        chosen = dim()
        start = draw.randrange(x.shape[chosen])
        return chosen, start, draw.randrange(1, x.shape[chosen] - start + 1)
    if op == "select":
        chosen = dim()
        return chosen, draw.randrange(-x.shape[chosen], x.shape[chosen])
    if op == "sliced":
        chosen = dim()
        size = x.shape[chosen]
        start = draw.randrange(size)
        end = draw.choice((draw.randrange(start + 1, size + 1), size + 5, 2**63 - 1))
        return chosen, [start - draw.choice((0, size)), end, draw.choice((1, 1, 2, 3))]
    if op == "expand":
        return ([2, *(draw.choice((-1, size, 3 if size == 1 else size)) for size in x.shape)][draw.randrange(2) :],)
    if op == "padded":
        count = draw.randint(1, min(x.dim(), 4))
        amounts = [draw.choice((0, 0, 1, 2, -1 if x.shape[-1 - place // 2] > 2 else 0)) for place in range(2 * count)]
        return amounts, draw.choice((0.0, 1.5))
    if op == "chunked":
        chosen, chunks = dim(), draw.randint(1, 4)
        return chosen, chunks, draw.randrange(len(x.chunk(chunks, chosen)))
    return ()


VIEWS = (
    *("reshape", "flatten", "unflatten", "permute", "transpose", "unsqueeze", "squeeze", "narrow", "select"),
    *("contiguous", "sliced", "chunked", "expand", "padded"),
)


@pytest.mark.sanitize
@pytest.mark.parametrize("op", VIEWS)
@pytest.mark.parametrize("seed", range(40))
def test_views_are_torchs(op: str, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    x = random_tensor(draw, least=2 if op in ("select", "squeeze") else 1)
    check(x, op, *arguments_of(draw, op, x))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 4, 5, 6), (1, 8, 3, 3)])
def test_contiguous_unless_channels_last(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for layout in (x, x.movedim(1, -1).contiguous().movedim(-1, 1), x.transpose(1, 2), x[:, :, :1], x[:1]):
        check(layout, contiguous_unless_channels_last.__name__)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 4, 5, 6), (1, 8, 3, 3)])
def test_channels_last(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for layout in (x, x.movedim(1, -1).contiguous().movedim(-1, 1), x.transpose(1, 2), x[:, :, :1], x[:1]):
        check(layout, channels_last.__name__)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_padding_keeps_the_layout(dtype: torch.dtype) -> None:
    image = torch.randn(2, 3, 4, 5).to(dtype)
    for x in (image, image.contiguous(memory_format=torch.channels_last)):
        text = "padded %0 [1,2,-1,1] 0.5\nreturn $0"
        padded = functional.pad(x, (1, 2, -1, 1), value=0.5)
        (result,) = ops.chain([x], text)
        assert torch.equal(result, padded)
        assert result.stride() == padded.stride()
    (result,) = ops.chain([image], "padded %0 [0,0,0,0] 0.5\nreturn $0")
    assert result.data_ptr() == image.data_ptr()


@pytest.mark.parametrize("size", range(8))
def test_slices_and_chunks_that_are_short_or_empty(size: int) -> None:
    x = torch.randn(3, size, 4)
    for start in range(-9, 9, 3):
        for end in range(-9, 9, 4):
            check(x, "sliced", 1, [start, end, 1])
            check(x, "sliced", -2, [start, end, 3])
    for chunks in range(1, 6):
        for place in range(len(x.chunk(chunks, 1))):
            check(x, "chunked", 1, chunks, place)


@pytest.mark.parametrize("images", [1, 2])
def test_rows_that_are_an_image_are_joined_with_the_channels_last(images: int) -> None:
    """Also of one image, whose distance to the next is anything."""
    rows, other = torch.randn(images, 12, 8), torch.randn(images, 5, 3, 4).contiguous(memory_format=torch.channels_last)
    calls = (
        ("transpose", Given(0), 1, 2),
        ("reshape", Result(0), [images, 8, 3, 4]),
        ("concat", (Result(1), Given(1)), 1),
    )
    text = calls_text([call_text(op, arguments) for op, *arguments in calls], [Result(2)])
    (result,) = ops.chain([rows, other], text)
    assert torch.equal(result, torch.cat([rows.transpose(1, 2).reshape(images, 8, 3, 4), other], 1))
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_views_of_nothing() -> None:
    x = torch.empty(0, 4, 6)
    for op, *arguments in (("reshape", [0, 24]), ("flatten", 0, 1), ("permute", [2, 0, 1]), ("narrow", 1, 1, 2)):
        check(x, op, *arguments)


def test_sizes_are_looked_up_in_each_call() -> None:
    sizes = [SizeOf(Given(0), 0), SizeOf(Result(0), 1), -1, 4]
    first = ("transpose", Given(0), 1, 2)
    text = calls_text(
        [call_text(each[0], each[1:]) for each in (first, ("reshape", Result(0), sizes), ("contiguous", Result(1)))],
        [Result(2)],
    )
    for shape in ((2, 8, 3), (1, 4, 5), (3, 12, 1)):
        x = torch.randn(shape)
        (result,) = ops.chain([x], text)
        assert torch.equal(result, x.transpose(1, 2).reshape(shape[0], shape[2], -1, 4))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (Computed("//", SizeOf(Given(0), 1), 4), lambda x: x.shape[1] // 4),
        (Computed("*", Computed("//", SizeOf(Given(0), 1), 4), 2), lambda x: x.shape[1] // 4 * 2),
        (Computed("*", SizeOf(Given(0), 1), SizeOf(Given(0), 2)), lambda x: x.shape[1] * x.shape[2]),
        (
            Computed("//", Computed("*", SizeOf(Result(0), 1), SizeOf(Result(0), 0)), 2),
            lambda x: x.shape[2] * x.shape[0] // 2,
        ),
        (
            Computed("+", SizeOf(Given(0), 0), Computed("%", Computed("-", 3, SizeOf(Given(0), 0)), -1)),
            lambda x: x.shape[0],
        ),
        (
            Computed("-", 0, Computed("//", Computed("-", 1, SizeOf(Given(0), 1)), 4)),
            lambda x: -((1 - x.shape[1]) // 4),
        ),
    ],
)
def test_what_is_made_of_sizes(size: Number, expected: Callable[[Tensor], int]) -> None:
    calls: list[tuple[Any, ...]] = [
        ("transpose", Given(0), 1, 2),
        ("reshape", Given(0), [size, -1]),
        ("contiguous", Result(1)),
    ]
    text = calls_text([call_text(each[0], each[1:]) for each in calls], [Result(2)])
    for shape in ((2, 8, 4), (6, 4, 2), (4, 12, 6)):
        x = torch.randn(shape)
        wanted = x.reshape(expected(x), -1)
        (result,) = ops.chain([x], text)
        assert torch.equal(result, wanted)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert ops.chain([torch.empty(shape)], text)[0].shape == wanted.shape


@pytest.mark.sanitize
@pytest.mark.parametrize("seed", range(60))
def test_arithmetic_is_pythons(seed: int) -> None:
    draw = random.Random(seed)
    x = torch.randn(draw.randrange(1, 40), draw.randrange(1, 9), 2)

    def number(depth: int) -> Number:
        if depth == 0 or draw.random() < 0.2:
            return draw.choice((draw.randrange(-30, 30), SizeOf(Given(0), draw.randrange(2))))
        return Computed(draw.choice(("+", "-", "*", "//", "%")), number(depth - 1), number(depth - 1))

    computed = Computed("+", SizeOf(Given(0), 0), number(3))
    text = calls_text([call_text("sliced", (Given(0), 0, [0, Computed("%", computed, 17), 1]))], [Result(0)])
    try:
        end = number_of(computed, lambda value, dim: x.shape[dim]) % 17
    except ZeroDivisionError:
        with pytest.raises(RuntimeError, match="expected numbers that can be computed"):
            ops.chain([x], text)
        return
    assert torch.equal(ops.chain([x], text)[0], x[:end])


def test_both_results_of_a_call() -> None:
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    norm = ("layer_norm", Given(0), None, None, 1e-5, Given(1), True, torch.float32)
    again = ("layer_norm", Result(0, 1), None, None, 1e-5, Result(0), True, torch.float32)
    text = calls_text([call_text(each[0], each[1:]) for each in (norm, again)], [Result(0, 1), Result(1), Result(1, 1)])
    out, total = ops.layer_norm(x, residual=residual, return_sum=True)
    last = ops.layer_norm(total, residual=out, return_sum=True)
    for result, wanted in zip(ops.chain([x, residual], text), (total, *last), strict=True):
        assert torch.equal(result, wanted)


BAD: dict[str, tuple[str, str]] = {
    "second of one": ("contiguous %0\nreturn $0.1", "expected which result of a call, below 1, got .1"),
    "third": ("layer_norm %0 - - 1e-5 - false -\nreturn $0.2", "expected which result of a call, below 2, got .2"),
    "no dimension": ("reshape %0 [%0,6]\nreturn $0", "expected a colon and a dimension"),
    "dimension": ("reshape %0 [%0:3,-1]\nreturn $0", r"expected dimensions of tensors in .*, got 3 of shape \[2, 6\]"),
    "size of no tensor": ("reshape %0 [%7:0,-1]\nreturn $0", "expected places of the 1 tensors"),
    "factor of no tensor": ("reshape %0 [%0:0;%7:0;*,-1]\nreturn $0", "expected places of the 1 tensors"),
    "factor of a later one": (
        "reshape %0 [%0:0;$0:0;*,-1]\nreturn $0",
        "expected the number of an earlier call below 0",
    ),
    "divided by nothing": (
        "reshape %0 [%0:0;0;//,-1]\nreturn $0",
        r"expected numbers that can be computed in \[%0:0;0;//",
    ),
    "rest of nothing": ("reshape %0 [%0:0;0;%,-1]\nreturn $0", "expected numbers that can be computed"),
    "too large": ("reshape %0 [%0:0;9223372036854775807;*,-1]\nreturn $0", "expected numbers that can be computed"),
    "sign of one": (
        "reshape %0 [%0:0;*,-1]\nreturn $0",
        "expected two numbers before the sign * in %0:0;*".replace("*", r"\*"),
    ),
    "two numbers": ("reshape %0 [%0:0;2,-1]\nreturn $0", "expected one number of at most 128 terms, got %0:0;2"),
    "no sign": ("reshape %0 [%0:0;2;/,-1]\nreturn $0", "expected a size, an integer or a sign in .*, got '/'"),
    "many terms": (
        f"reshape %0 [{'%0:0' + ';1;*' * 64},-1]\nreturn $0",
        "expected one number of at most 128 terms",
    ),
    "size of a later one": ("reshape %0 [$0:0,-1]\nreturn $0", "expected the number of an earlier call below 0"),
    "shape": ("reshape %0 [5,-1]\nreturn $0", r"shape: expected sizes for the elements of \[2, 6\], got \[5, -1\]"),
    "two open": ("reshape %0 [-1,-1]\nreturn $0", "shape: expected sizes for the elements"),
    "negative": ("reshape %0 [-2,-6]\nreturn $0", "shape: expected sizes for the elements"),
    "many sizes": ("reshape %0 [1,1,1,1,1,1,1,1,12]\nreturn $0", "shape: expected at most 8 dimensions, got 9"),
    "start": ("flatten %0 2 -1\nreturn $0", "start_dim: expected one of 2 dimensions, got 2"),
    "unflatten": ("unflatten %0 -1 [4,-1]\nreturn $0", "shape: expected sizes"),
    "twice": ("permute %0 [0,0]\nreturn $0", "dims: expected each of 2 dimensions"),
    "some": ("permute %0 [0]\nreturn $0", "dims: expected each of 2 dimensions"),
    "dim": ("transpose %0 0 -3\nreturn $0", "dim1: expected one of 2 dimensions, got -3"),
    "unsqueeze": ("unsqueeze %0 3\nreturn $0", "dim: expected one of 3 dimensions, got 3"),
    "squeeze": ("squeeze %0 2\nreturn $0", "dim: expected one of 2 dimensions, got 2"),
    "length": ("narrow %0 1 4 3\nreturn $0", "length: expected a part of 6 elements, got 3 from 4 on"),
    "before": ("narrow %0 1 -1 3\nreturn $0", "length: expected a part"),
    "step": ("sliced %0 1 [0,6,0]\nreturn $0", "step: expected a number above 0, got 0"),
    "slice of no dimension": ("sliced %0 2 [0,6,1]\nreturn $0", "dim: expected one of 2 dimensions, got 2"),
    "slice of two numbers": ("sliced %0 1 [0,6]\nreturn $0", r"taken: expected start, end and step, got \[0, 6\]"),
    "amounts of halves": ("padded %0 [1] 0.0\nreturn $0", "amounts: expected two numbers for each of at most 2"),
    "amounts of three": (
        "padded %0 [1,1,1,1,1,1] 0.0\nreturn $0",
        "amounts: expected two numbers for each of at most 2",
    ),
    "nothing left": ("padded %0 [-4,-3] 0.0\nreturn $0", r"amounts: expected amounts that leave something of \[2, 6\]"),
    "expanded": ("expand %0 [2,7]\nreturn $0", r"size: expected sizes that \[2, 6\] expands to, got \[2, 7\]"),
    "fewer dimensions": ("expand %0 [6]\nreturn $0", r"size: expected sizes that \[2, 6\] expands to, got \[6\]"),
    "open in front": ("expand %0 [-1,2,6]\nreturn $0", "size: expected sizes that"),
    "no image": ("channels_last %0\nreturn $0", r"image: expected at least 3 dimensions, got \[2, 6\]"),
    "chunks": ("chunked %0 1 0 0\nreturn $0", "chunks: expected a number above 0, got 0"),
    "no such chunk": ("chunked %0 1 4 3\nreturn $0", "place: expected one of 3 parts, got 3"),
    "chunk before": ("chunked %0 1 4 -1\nreturn $0", "place: expected one of 3 parts, got -1"),
    "index": ("select %0 0 2\nreturn $0", "index: expected one of 2 elements, got 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    text, message = BAD[name]
    with pytest.raises(RuntimeError, match=f"xopt::[a-z_]+: (calls: )?{message}"):
        ops.chain([torch.randn(2, 6)], text)


@pytest.mark.parametrize("dims", [9])
def test_more_dimensions_than_views_have(dims: int) -> None:
    x = torch.randn([1] * dims)
    with pytest.raises(RuntimeError, match="xopt::transpose: input: expected at most 8 dimensions"):
        ops.chain([x], "transpose %0 0 1\nreturn $0")


def layer_calls() -> tuple[list[Tensor], str]:
    """What a layer of a transformer is: merged projections, heads, attention, a norm of the sum."""
    x, weight, square = torch.randn(2, 5, 32), torch.randn(96, 32), torch.randn(32, 32)
    tensors = [x, *(ops.linear_pack(each, dtype=torch.float32) for each in (weight, square))]
    lines = ["linear %0 %1 96 - none 0.0 0.0 none - false float32 1.0 0 0 -"]
    for place in range(3):
        lines.append(f"narrow $0 -1 {32 * place} 32")
    for place in range(3):
        lines += [f"reshape ${1 + place} [%0:0,%0:1,-1,8]", f"transpose ${4 + 2 * place} 1 2"]
    lines += ["attention $5 $7 $9 - - false 0 0 false -", "flatten $10 2 -1"]
    lines.append("linear_norm $11 %2 32 - %0 layer_norm - - 1e-5 float32 true")
    return tensors, "\n".join([*lines, "return $12.1 $12"])


def test_a_layer_and_what_is_known_of_it_without_values() -> None:
    tensors, calls = layer_calls()
    x, weight, square = tensors
    parts = ops.linear(x, weight, 96).chunk(3, -1)
    query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in parts)
    attended = ops.attention(query, key, value).flatten(2)
    wanted = ops.linear_norm(attended, square, 32, residual=x, return_sum=True)[::-1]
    for result, each in zip(ops.chain(tensors, calls), wanted, strict=True):
        assert torch.equal(result, each)
    with FakeTensorMode() as mode:
        faked = ops.chain([mode.from_tensor(each) for each in tensors], calls)
    assert [(each.shape, each.dtype) for each in faked] == [(each.shape, each.dtype) for each in wanted]
    work = COSTS["chain"].work([each.shape for each in tensors], calls)
    products: Callable[[int, int], int] = lambda columns, terms: 2 * 2 * 5 * columns * terms  # noqa: E731
    assert work.flop == products(96, 32) + products(32, 32) + 2 * 2 * (2 * 4 * 5 * 5 * 8)
