"""xopt::combine against torch in float64, and models in which it is a link of a chain."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.families import Family, calls_of
from tests.test_concat import LAYOUTS, laid_out
from xopt.ops.combine import HOW
from xopt.ops.fakes import FLOATING

ops: Any = torch.ops.xopt
SIZES = (0, 1, 1, 2, 3, 5, 8, 33)


@dataclass(frozen=True)
class CombineCase:
    seed: int = 0
    sizes: str = "2"
    ones: int = 0
    """Bits: the dimensions along which the first has one value, then those of the second."""
    missing: int = 0
    """Outer dimensions that the second does not have; of the first, if it is negative."""
    how: str = "add"
    relu: bool = False
    dtype: str = "float32"
    layout: str = "contiguous"
    other_layout: str = "contiguous"
    special: bool = False


def sample(rng: random.Random) -> CombineCase:
    dims = rng.choice((0, 1, 2, 3, 4, 4, 5, 8))
    return CombineCase(
        seed=rng.randrange(1_000_000),
        sizes="x".join(str(rng.choice(SIZES[: 3 if dims > 5 else None])) for _ in range(dims)),
        ones=rng.choice((0, 0, rng.randrange(4**dims))),
        missing=rng.choice((0, 0, rng.randint(-dims, dims))),
        how=rng.choice(list(HOW)),
        relu=rng.random() < 0.3,
        dtype=str(rng.choice(FLOATING)).removeprefix("torch."),
        layout=rng.choice(LAYOUTS),
        other_layout=rng.choice(LAYOUTS),
        special=rng.random() < 0.1,
    )


def part(case: CombineCase, which: int, rng: random.Random) -> Tensor:
    sizes = [int(size) for size in case.sizes.split("x") if size]
    own = [1 if case.ones >> (2 * dim + which) & 1 else size for dim, size in enumerate(sizes)]
    own = own[max(0, case.missing if which else -case.missing) :]
    values = torch.randn(own, dtype=torch.float64).to(getattr(torch, case.dtype))
    if case.special and values.numel() > 1:
        values.view(-1)[:: rng.randint(1, 3)] = rng.choice((float("nan"), float("inf"), -float("inf"), -0.0))
    layout = case.other_layout if which else case.layout
    return laid_out(values, layout, rng) if own else values


def check(case: CombineCase) -> None:
    torch.manual_seed(case.seed)
    rng = random.Random(case.seed)
    first, second = part(case, 0, rng), part(case, 1, rng)
    got = ops.combine(first, second, case.how, case.relu)
    exact = HOW[case.how](first.double(), second.double())
    expected = (exact.relu() if case.relu else exact).to(first.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)  # one operation, rounded once
    if got.numel() and first.shape == second.shape == got.shape and min(got.shape, default=1) > 1:
        assert got.stride() == HOW[case.how](first, second).stride()


FAMILY = Family("combine", CombineCase, sample, check)


def test_cases(case_batch: list[CombineCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
def test_tails() -> None:
    FAMILY.run_all(
        CombineCase(seed=size, sizes=f"2x{size}x3x{size}", ones=ones, how=how, relu=True, dtype=dtype, layout=layout)
        for size in (1, 2, 7, 33)
        for ones in (0, 0b10100000, 0b00001000, 0b10000000, 0b01010101)
        for how in HOW
        for dtype in ("float32", "bfloat16", "float16")
        for layout in ("contiguous", "channels_last", "slice")
    )


@pytest.mark.parametrize("sizes", [((1, 5000), (1, 5000)), ((3, 5000), (3, 1)), ((300, 33), (33,)), ((1, 9001), ())])
def test_the_same_on_any_number_of_threads(torch_threads: None, sizes: Any) -> None:
    first, second = (torch.randn(each) for each in sizes)
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        assert torch.equal(ops.combine(first, second, "mul"), first * second)


def test_an_image_keeps_its_channels_last() -> None:
    image = torch.randn(2, 5, 3, 4).contiguous(memory_format=torch.channels_last)
    for first, second in ((image, torch.randn(2, 5, 1, 1)), (torch.randn(2, 5, 1, 1), image), (image, torch.randn(4))):
        got = ops.combine(first, second, "mul")
        assert torch.equal(got, first * second)
        assert got.stride() == (first * second).stride() == image.stride()


# ---- Blocks ----------------------------------------------------------------------------------------------------------


class Excited(nn.Module):
    """A block with squeeze-and-excitation, whose end is a residual's."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.first, self.last = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        sizes = (16, 4), (4, 16)
        self.squeeze, self.excite = (nn.Linear(*each) if linear else nn.Conv2d(*each, 1) for each in sizes)

    def forward(self, x: Tensor) -> Tensor:
        image = self.first(x).relu()
        pixel = image.mean((2, 3)) if self.linear else image.mean((2, 3), keepdim=True)
        factor = torch.sigmoid(self.excite(self.squeeze(pixel).relu()))
        factor = factor.view(len(x), 16, 1, 1) if self.linear else factor
        return self.last(image * factor).tanh()  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Two branches that meet, behind another layer and with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.pool, self.last = nn.MaxPool2d(2, 2), nn.Conv2d(16, 8, 1)
        self.place = nn.Parameter(torch.randn(1, 16, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.relu(self.pool(self.one(x).relu()) + self.pool(self.other(x)))
        return self.last(both + self.place)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "excited": lambda: nn.Sequential(nn.Conv2d(3, 8, 1), Excited(linear=False), nn.Conv2d(16, 3, 1)),
    "excited by linear layers": lambda: nn.Sequential(nn.Conv2d(3, 8, 1), Excited(linear=True), nn.Conv2d(16, 3, 1)),
    "branches": lambda: nn.Sequential(nn.Conv2d(3, 8, 1), Branches(), nn.Conv2d(8, 3, 1)),
}


def combined() -> int:
    return calls_of("combine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_in_a_chain(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = MODELS[name]().eval()
    optimized = xopt.optimize(source, dtype=dtype, config=xopt.Config(fuse_pointwise=False))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    with torch.no_grad():
        for batch in (1, 2, 2, 2, 1):
            x = torch.randn(batch, 3, 16, 16)
            before = combined()
            torch.testing.assert_close(optimized(x), source(x), atol=tolerance, rtol=tolerance)
            assert combined() - before == (2 if (name, dtype) == ("branches", torch.float32) else 1)


def test_shapes_that_do_not_go_together_are_torchs_error() -> None:
    model = xopt.optimize(MODELS["branches"]().eval(), dtype=torch.float32)
    with torch.no_grad():
        model(torch.randn(1, 3, 16, 16))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="must match the size of tensor b"):
                model(torch.randn(1, 3, 32, 16))
        expected = model(torch.randn(2, 3, 16, 16))
    assert expected.shape == (2, 3, 4, 4)


def test_a_parameter_that_is_moved_to_another_dtype() -> None:
    torch.manual_seed(0)
    source = MODELS["branches"]().eval()
    model, x = xopt.optimize(source, dtype=torch.float32), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        for moved in (source, model):
            moved.double()
        torch.testing.assert_close(model(x.double()), source(x.double()), rtol=1e-4, atol=1e-4)


class Decomposed(nn.Module):
    """Biases of relative positions by rows and columns, as SAM and MViT have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.columns, self.last = nn.Linear(24, 12), nn.Linear(24, 12), nn.Linear(144, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        rows, columns = self.rows(x).sigmoid(), self.columns(x).relu()
        both = (rows[..., :, None] + columns[..., None, :]) * columns[..., None, :]
        return self.last((both - rows[..., :, None]).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_spread_over_rows_and_columns(dtype: torch.dtype) -> None:
    source = Decomposed().eval()
    config = xopt.Config(fuse_pointwise=False)  # which would make one of all three
    model = xopt.optimize(source, dtype=dtype, sample_input=torch.randn(1, 24, 9, 8), config=config)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    with torch.no_grad():
        for batch in (1, 2, 2, 3):
            x = torch.randn(batch, 24, 9, 8)
            before = combined()
            torch.testing.assert_close(model(x), source(x), atol=tolerance, rtol=tolerance)
            assert combined() == before + 3
        x = torch.randn(2, 24, 9, 8, requires_grad=True)
    for _ in range(2):
        expected = torch.autograd.grad(source(x).sum(), x)[0]
        torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x)[0], expected, atol=0.1, rtol=0.1)


def test_shapes_that_cannot_be_spread_are_torchs_error() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 64), nn.Linear(8, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.relu(self.one(x)).softmax(-1) * self.other(y).tanh().softmax(0)  # type: ignore[no-any-return]

    model = xopt.optimize(Two().eval(), dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            assert model(torch.randn(200, 8), torch.randn(200, 8)).shape == (200, 64)
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            model(torch.randn(200, 8), torch.randn(201, 8))
