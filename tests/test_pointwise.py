"""xopt::pointwise against float64, and models whose arithmetic is done by it."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.families import Family, calls_of
from tests.test_concat import LAYOUTS, laid_out
from xopt.modules.activation import ACTIVATIONS
from xopt.modules.pointwise import PLAIN
from xopt.ops.fakes import FLOATING

ops: Any = torch.ops.xopt
SIZES = (0, 1, 1, 2, 3, 5, 8, 33, 130)
NUMBERS = {"leaky_relu": (0.2,), "clamp": (-0.7, 1.1)}
BINARY = ("add", "sub", "mul", "div")
NAMES = [*BINARY, *BINARY, "abs", "sqrt", "exp", "softplus", *(name for name in ACTIVATIONS if name != "none")]
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@dataclass(frozen=True)
class PointwiseCase:
    seed: int = 0
    sizes: str = "2"
    inputs: int = 1
    ones: int = 0
    """Bits, as many for each input as there are dimensions: those along which it has one value."""
    missing: int = 0
    """Outer dimensions that the second input does not have."""
    steps: int = 1
    dtype: str = "float32"
    """Of each second input; the others have fp32."""
    out_dtype: str = "float32"
    layout: str = "contiguous"
    other_layout: str = "contiguous"
    special: bool = False


def sample(rng: random.Random) -> PointwiseCase:
    dims = rng.choice((0, 1, 2, 3, 4, 4, 5, 8))
    inputs = rng.choice((1, 2, 2, 3, 8))
    return PointwiseCase(
        seed=rng.randrange(1_000_000),
        sizes="x".join(str(rng.choice(SIZES[: 3 if dims > 5 else 8 if dims > 3 else None])) for _ in range(dims)),
        inputs=inputs,
        ones=rng.choice((0, 0, rng.randrange(2 ** (dims * inputs)))),
        missing=rng.choice((0, 0, rng.randint(0, dims))),
        steps=rng.choice((1, 2, 3, 5, 24)),
        dtype=str(rng.choice(FLOATING)).removeprefix("torch."),
        out_dtype=str(rng.choice(FLOATING)).removeprefix("torch."),
        layout=rng.choice(LAYOUTS),
        other_layout=rng.choice(LAYOUTS),
        special=rng.random() < 0.1,
    )


def made_input(case: PointwiseCase, which: int, rng: random.Random) -> Tensor:
    sizes = [int(size) for size in case.sizes.split("x") if size]
    own = [1 if case.ones >> (which * len(sizes) + dim) & 1 else size for dim, size in enumerate(sizes)]
    own = own[case.missing :] if which == 1 else own
    dtype = getattr(torch, case.dtype) if which % 2 == 0 else torch.float32
    values = torch.randn(own, dtype=torch.float64).to(dtype)
    if case.special and values.numel() > 1:
        values.view(-1)[:: rng.randint(1, 3)] = rng.choice((float("nan"), float("inf"), -float("inf"), -0.0))
    return laid_out(values, case.other_layout if which else case.layout, rng) if own else values


def made_steps(case: PointwiseCase, rng: random.Random) -> list[tuple[str, list[str], tuple[float, ...]]]:
    """The last of them leads back to all inputs or not, as it comes."""
    steps = []
    for place in range(case.steps):
        how = rng.choice(NAMES)
        known = [f"x{i}" for i in range(case.inputs)] + [f"v{i}" for i in range(max(0, place - 3), place)] * 2
        given = [rng.choice(known) for _ in range(2 if how in BINARY else 1)]
        if how in BINARY and rng.random() < 0.3:
            given[rng.randrange(2)] = repr(rng.choice((0.5, -1.25, 3.0, 1e-05)))
        steps.append((how, given, NUMBERS.get(how, ())))
    return steps


@dataclass(frozen=True)
class Bounded:
    """A value and how far fp32 may be from it, to the first order."""

    value: Tensor
    error: Tensor

    @staticmethod
    def of(value: Tensor) -> Bounded:
        return Bounded(value, torch.zeros_like(value))


def stepped(how: str, given: list[Bounded], numbers: tuple[float, ...], rough: bool) -> Bounded:
    unit, x = ROUNDING[torch.float32], given[0]
    if how in BINARY:
        y = given[1]
        value = PLAIN[how](x.value, y.value)
        error = x.error + y.error
        if how == "mul":
            error = x.value.abs() * y.error + y.value.abs() * x.error
        if how == "div":
            error = (x.error + value.abs() * y.error) / (y.value.abs() - y.error).clamp(min=0)
        return Bounded(value, error + 2 * unit * value.abs())
    if how in PLAIN:
        value = PLAIN[how](x.value)
        low, high = PLAIN[how](x.value - x.error), PLAIN[how](x.value + x.error)
        inside = x.value - x.error >= 0 if how == "sqrt" else torch.ones_like(value, dtype=torch.bool)
        error = (
            torch.maximum((value - low).abs(), (high - value).abs())
            + (2e-6 if how in ("exp", "softplus") else 2 * unit) * value.abs()
        )
        return Bounded(value, torch.where(inside, error, torch.inf))
    value = ACTIVATIONS[how](x.value, *(*numbers, 0.0, 0.0)[:2])
    return Bounded(value, 1.2 * x.error + 2e-6 * (1 + value.abs()) + 2e-4 * rough * value.abs())


def check(case: PointwiseCase) -> None:
    torch.manual_seed(case.seed)
    rng = random.Random(case.seed)
    inputs = [made_input(case, which, rng) for which in range(case.inputs)]
    steps = made_steps(case, rng)
    out_dtype = getattr(torch, case.out_dtype)
    text = ";".join(":".join([how, *given, *map(repr, numbers)]) for how, given, numbers in steps)
    got = ops.pointwise(inputs, text, out_dtype)

    shape = torch.broadcast_shapes(*(each.shape for each in inputs))
    values = {f"x{i}": Bounded.of(each.double().expand(shape)) for i, each in enumerate(inputs)}
    for place, (how, given, numbers) in enumerate(steps):
        operands = [
            values.get(each) or Bounded.of(torch.full(shape, float(each), dtype=torch.float64)) for each in given
        ]
        values[f"v{place}"] = stepped(how, operands, numbers, out_dtype == torch.bfloat16)
    exact = values[f"v{len(steps) - 1}"]
    assert (got.dtype, got.shape) == (out_dtype, shape)
    # A value that fp32 may miss by much, or cannot hold, says nothing; a NaN comes out as one.
    tells = [each.error < 1e-2 * (1 + each.value.abs()) for name, each in values.items() if name[0] == "v"]
    tells += [(each.value.abs() < 1e30) | each.value.isnan() for each in values.values()]
    finite = torch.stack(tells).all(0) & (exact.value.abs() < torch.finfo(out_dtype).max)
    error = (got.double() - exact.value).abs()
    bound = 1.01 * exact.error + ROUNDING[out_dtype] * exact.value.abs() + torch.finfo(out_dtype).tiny
    assert not (finite & ~(error <= bound)).any(), f"{text}: {float((error / bound)[finite].max())} times the bound"


FAMILY = Family("pointwise", PointwiseCase, sample, check)


def test_cases(case_batch: list[PointwiseCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
def test_tails() -> None:
    FAMILY.run_all(
        PointwiseCase(
            seed=size,
            sizes=f"2x{size}x3x{size}",
            inputs=3,
            ones=ones,
            steps=4,
            dtype=dtype,
            out_dtype=dtype,
            layout=layout,
        )
        for size in (1, 2, 7, 33)
        for ones in (0, 0b1010_0000_0000, 0b0000_1000_0001, 0b0101_0111_0111)
        for dtype in ("float32", "bfloat16", "float16")
        for layout in ("contiguous", "channels_last", "slice")
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("name", [name for name in NAMES if name not in BINARY])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_each_function(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-9, 9, 1001), torch.tensor([0.0, -0.0, 30.0, -30.0, torch.nan])]).to(dtype)
    got = ops.pointwise([x], ":".join([name, "x0", *map(repr, NUMBERS.get(name, ()))]))
    exact = stepped(name, [Bounded.of(x.double())], NUMBERS.get(name, ()), dtype == torch.bfloat16)
    bound = exact.error.nan_to_num(posinf=0) + ROUNDING[dtype] * exact.value.abs() + torch.finfo(dtype).tiny
    held = exact.value.abs() <= torch.finfo(dtype).max  # an exp of 9 is 8103, of 30 no fp16
    assert torch.equal(got.isnan(), exact.value.isnan())
    assert ((got.double() - exact.value).abs() <= bound)[held].all()


@pytest.mark.parametrize("sizes", [((1, 5000), (1, 5000)), ((300, 33), (33,)), ((7, 3, 900), (3, 1)), ((1, 9001), ())])
def test_the_same_on_any_number_of_threads(torch_threads: None, sizes: Any) -> None:
    first, second = (torch.randn(each) for each in sizes)
    results = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        results.append(ops.pointwise([first, second], "mul:x0:x1;silu:v0"))
    assert all(torch.equal(each, results[0]) for each in results)
    assert torch.allclose(results[0], functional.silu(first * second), atol=1e-5)


def test_an_image_keeps_its_channels_last() -> None:
    image, factor = torch.randn(2, 5, 3, 4).contiguous(memory_format=torch.channels_last), torch.randn(5, 1, 1)
    for inputs in ([image], [image, factor], [factor, image], [image, torch.randn(2, 5, 3, 4)]):
        steps = "relu:x0" if len(inputs) == 1 else "mul:x0:x1"
        got = ops.pointwise(inputs, steps)
        expected = inputs[0].relu() if len(inputs) == 1 else inputs[0] * inputs[1]
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride() == image.stride()


# ---- Models ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Some arithmetic between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 64), nn.Linear(32, 8)
        self.scale, self.bias = nn.Parameter(torch.tensor([0.8])), nn.Parameter(torch.tensor([-0.3]))

    def between(self, one: Tensor, other: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(*self.first(x).split(32, -1)))  # type: ignore[no-any-return]


class Gated(Model):
    """A gate beside what it gates, of which no product makes one (MambaOut)."""

    def between(self, one: Tensor, other: Tensor) -> Tensor:
        return functional.gelu(one) * (other + one)


class Numbers(Model):
    """What is free of norms: activations that keep their variance."""

    def between(self, one: Tensor, other: Tensor) -> Tensor:
        return functional.silu(one).mul_(1.7881293296813965) * 0.2 - other / 3


class Affine(Model):
    """An affine map of two numbers, which are parameters in fp32 (HGNetV2)."""

    def between(self, one: Tensor, other: Tensor) -> Tensor:
        return self.scale * (one + other) + self.bias


class Star(Model):
    """StarReLU."""

    def between(self, one: Tensor, other: Tensor) -> Tensor:
        return self.scale * functional.relu(one) ** 2 + torch.addcmul(self.bias, other, other)


class Written(Model):
    """Functions one by one."""

    def between(self, one: Tensor, other: Tensor) -> Tensor:
        root = torch.sqrt(other.abs() + 1.0)
        return torch.exp(-one.abs()) * torch.rsqrt(torch.square(one) + 2) / root + functional.softplus(-root).clamp(
            -3, 1
        )


def pointwise_calls() -> int:
    return calls_of("pointwise")


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("make", [Gated, Numbers, Affine, Star, Written])
@torch.no_grad()
def test_one_pass(make: Any, dtype: torch.dtype) -> None:
    source = make().eval()
    model, plain = xopt.optimize(source, dtype=dtype), copy.deepcopy(source).to(dtype)
    truth = copy.deepcopy(source).double()
    for rows in (300, 301, 301, 301, 300):
        x = torch.randn(rows, 24)
        before = pointwise_calls()
        result, exact = model(x), truth(x.double())
        assert pointwise_calls() == before + 1
        errors = [float((each.double() - exact).norm() / exact.norm()) for each in (result, plain(x.to(dtype)))]
        assert errors[0] <= 1.1 * errors[1] + 2e-7
    off = xopt.optimize(source, dtype=dtype, config=xopt.Config(fuse_pointwise=False))
    before = pointwise_calls()
    torch.testing.assert_close(off(x), result, atol=3e-2, rtol=3e-2)
    assert pointwise_calls() == before


@torch.no_grad()
def test_what_else_is_wanted_stays() -> None:
    """Results in between that others read or the forward returns, one that is smaller, and sizes."""

    class Wanted(Model):
        def forward(self, x: Tensor) -> Any:
            one, other = self.first(x).split(32, -1)
            between = functional.silu(one) * 2.0
            small = torch.sigmoid(self.last(one)[:, :1] * 0.5)
            sum = between + other.exp()
            rest = (sum * small).reshape(sum.size(0), 32)
            return self.last(rest), between, sum.mean()

    source = Wanted().eval()
    model = xopt.optimize(source, dtype=torch.float32)
    for rows in (300, 301, 301, 300):
        x = torch.randn(rows, 24)
        for got, expected in zip(model(x), source(x), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        model(x)[1].zero_()  # which nobody else holds


@torch.no_grad()
def test_casts_that_say_more_than_a_dtype_stay() -> None:
    """Another tensor's dtype, a layout, the bits of a float."""

    class Casts(Model):
        def between(self, one: Tensor, other: Tensor) -> Tensor:
            sum = (one * 0.5 + other).type_as(self.scale).exp()
            image = (sum[None, :, :, None] * 2.0).to(dtype=torch.float32, memory_format=torch.channels_last)
            bits = (other.abs() * 0.25 + 1.0).view(torch.int32)
            return image[0, :, :, 0] * 3.0 - bits.sign().float()

    source = Casts().eval()
    model = xopt.optimize(source, dtype=torch.float32)
    for _ in range(3):
        x = torch.randn(300, 24)
        torch.testing.assert_close(model(x), source(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_few_values_that_no_chain_reaches_stay_torchs() -> None:
    """A scan over time, whose steps an operator's calls would slow down."""

    class Scan(Model):
        def between(self, one: Tensor, other: Tensor) -> Tensor:
            state, seen = torch.zeros_like(one[:, 0]), []
            for place in range(16):
                state = torch.maximum(state, one[:, place]) * 0.9 + other[:, place].exp()
                seen.append(state)
            return torch.stack([*seen, *seen], -1)

    source = Scan().eval()
    model = xopt.optimize(source, dtype=torch.float32)
    for _ in range(3):
        x, before = torch.randn(300, 24), pointwise_calls()
        torch.testing.assert_close(model(x), source(x), atol=1e-5, rtol=1e-5)
        assert pointwise_calls() == before
    (fusion,) = xopt.report(model).fusions
    assert not any("mul" in label for label in fusion.fused)


@torch.no_grad()
def test_more_than_an_operator_takes() -> None:
    class Many(Model):
        def between(self, one: Tensor, other: Tensor) -> Tensor:
            for place in range(20):
                one = functional.silu(one * 0.9 + 0.1)
                one = one + other[:, place : place + 1].abs()
            return one

    source = Many().eval()
    model, x = xopt.optimize(source, dtype=torch.float32), torch.randn(300, 24)
    for _ in range(3):
        before = pointwise_calls()
        torch.testing.assert_close(model(x), source(x), atol=1e-5, rtol=1e-5)
        assert pointwise_calls() - before >= 4


@torch.no_grad()
def test_shapes_that_do_not_go_together_are_torchs_error() -> None:
    class Two(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return self.last(functional.silu(self.first(x)[:, :32]) * 2 + self.first(y)[:, 32:].exp())  # type: ignore[no-any-return]

    source = Two().eval()
    model = xopt.optimize(source, dtype=torch.float32)
    for _ in range(3):
        model(torch.randn(300, 24), torch.randn(300, 24))
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        model(torch.randn(300, 24), torch.randn(299, 24))
    x, y = torch.randn(300, 24), torch.randn(1, 24)
    torch.testing.assert_close(model(x, y), source(x, y), atol=1e-5, rtol=1e-5)


def test_gradients_of_inputs() -> None:
    source = Star().eval()
    model, x = xopt.optimize(source, dtype=torch.float32), torch.randn(300, 24, requires_grad=True)
    for _ in range(2):
        expected = torch.autograd.grad(source(x).sum(), x)[0]
        torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x)[0], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_parameters_that_change() -> None:
    source = Affine().eval()
    model, x = xopt.optimize(source, dtype=torch.float32), torch.randn(300, 24)
    for step in range(4):
        for each in (source, model):
            each.scale.fill_(float(step))
        torch.testing.assert_close(model(x), source(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_transposed_operand_does_not_decide_where_the_result_lies() -> None:
    """The residual comes first in torch's sum, as it does here (ResMLP)."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tokens, self.last = nn.Linear(64, 64), nn.Linear(48, 48)
            self.scale = nn.Parameter(torch.randn(48))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale + 1.0
            x = x + self.scale * self.tokens(x.transpose(1, 2)).transpose(1, 2)
            return x + self.last(x)  # type: ignore[no-any-return]

    source = Mixed().eval()
    for dtype in (torch.float32, torch.bfloat16):
        model = xopt.optimize(source, dtype=dtype)
        for _ in range(3):
            x = torch.randn(4, 64, 48)
            result, expected = model(x), source(x)
            assert result.stride() == expected.stride()
            tolerance = 1e-5 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
