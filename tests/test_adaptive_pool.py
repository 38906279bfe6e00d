"""xopt::adaptive_pool and what uses it, against torch in float64."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import xopt
from tests import cases
from tests.cases import DTYPES
from tests.conv_cases import LAYOUTS, image, joined, last, numbers
from tests.families import Family
from tests.pool_checks import check_in_recorded_forward, check_module, expect_pooled

Tensor = torch.Tensor
ops = torch.ops.xopt
MAX: Any = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
AVERAGE: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


@dataclass(frozen=True)
class AdaptivePoolCase:
    seed: int = 0
    kind: str = "max"
    images: int = 1
    size: str = "5x5"
    channels: int = 1
    to: str = "1x1"
    input: str = "f32"
    values: str = "normal"
    layout: str = "channels_last"


VALUES = {"max": ("tiny", "specials"), "average": ("tiny", "mixed"), "norm": ("mixed",)}  # whose squares are numbers


def sample(rng: random.Random) -> AdaptivePoolCase:
    dims, kind = rng.choice((1, 2, 2, 2, 3)), rng.choice(("max", "average", "norm"))
    return AdaptivePoolCase(
        seed=rng.randrange(1_000_000),
        kind=kind,
        images=rng.choice((1, 1, 2, 3, 0)),
        size=joined([rng.choice((1, 2, 5, 7, 12)) for _ in range(dims)]),
        channels=max(1, cases.pick_size(rng)),
        to=joined([rng.choice((1, 1, 2, 3, 7, 9)) for _ in range(dims)]),
        input=rng.choice(cases.FLOATS),
        values=rng.choice(("normal", "integers", "zeros", *VALUES[kind])),
        layout=cases.pick(rng, LAYOUTS),
    )


def exact(case: AdaptivePoolCase, x: Tensor) -> Tensor:
    dims = len(numbers(case.to))
    if case.kind == "norm":
        return norm_of_parts(x, numbers(case.to))
    return (MAX if case.kind == "max" else AVERAGE)[dims - 1](x, numbers(case.to))  # type: ignore[no-any-return]


def norm_of_parts(x: Tensor, to: list[int]) -> Tensor:
    """Part by part, which torch has no function for."""
    result = x.new_zeros(*x.shape[:2], *to)
    for place in itertools.product(*map(range, to)):
        part = x
        for dim, (at, count) in enumerate(zip(place, to, strict=True), 2):
            begin, end = at * x.shape[dim] // count, -(-(at + 1) * x.shape[dim] // count)
            part = part.narrow(dim, begin, end - begin)
        rows: tuple[Any, ...] = (slice(None), slice(None), *place)
        result[rows] = part.flatten(2).norm(dim=-1)
    return result


def check(case: AdaptivePoolCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.images, case.channels, *numbers(case.size))
    x = image(case.values, shape, DTYPES[case.input], generator, case.layout)
    got = ops.adaptive_pool(x, case.kind, numbers(case.to))
    terms = int(torch.tensor(numbers(case.size)).prod())
    expect_pooled(got, x, case.kind, functools.partial(exact, case), terms)


FAMILY = Family("adaptive_pool", AdaptivePoolCase, sample, check)


def test_cases(case_batch: list[AdaptivePoolCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["channels_last", "slice"])
@pytest.mark.parametrize("size", ["3x40x60x60", "1x333x30x20", "2x45x3x30x31", "3x2100x7x7"])
@pytest.mark.parametrize("kind", ["average", "norm"])
def test_few_images_are_the_same_on_any_number_of_threads(
    torch_threads: None, size: str, layout: str, kind: str
) -> None:
    """Threads share lines or channels of images that are fewer than they are."""
    images, channels, *spatial = numbers(size)
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(images, *spatial, channels + 8).to(dtype) + 1
        x = (whole[..., :channels] if layout == "slice" else whole[..., :channels].contiguous()).movedim(-1, 1)
        over = [*range(2, x.dim())]
        exact = x.double()
        expected = exact.mean(over, True) if kind == "average" else torch.linalg.vector_norm(exact, 2, over, True)
        results = []
        for count in (1, 2, 3, 4, 7):
            torch.set_num_threads(count)
            results.append(ops.adaptive_pool(x, kind, [1] * len(spatial)))
        torch.testing.assert_close(
            results[0].double(), expected, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-6
        )
        assert all(torch.equal(result, results[0]) for result in results)


X = torch.randn(2, 8, 6, 6)
ERRORS: dict[str, tuple[Any, str]] = {
    "kind": (lambda: ops.adaptive_pool(X, "min", [1, 1]), "kind: expected one of max, average, norm, got 'min'"),
    "dimensions": (lambda: ops.adaptive_pool(X[0, 0], "max", []), r"input: expected 3 to 5 .*got shape \[6, 6\]"),
    "count": (lambda: ops.adaptive_pool(X, "max", [1]), "output_size: expected 2 numbers, got 1"),
    "none": (lambda: ops.adaptive_pool(X, "max", [1, 0]), r"output_size: expected numbers of at least 1, got \[1, 0\]"),
    "empty": (lambda: ops.adaptive_pool(X[..., :0], "max", [1, 1]), "input: expected elements along .* dimension 1"),
    "dtype": (lambda: ops.adaptive_pool(X.long(), "max", [1, 1]), "input: expected dtype .*, got int64"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    make, message = ERRORS[name]
    with pytest.raises(RuntimeError, match="xopt::adaptive_pool: " + message):
        make()


MODULES: dict[str, Any] = {
    "average": lambda: nn.AdaptiveAvgPool2d(1),
    "uneven": lambda: nn.AdaptiveAvgPool2d((3, 7)),
    "as it is": lambda: nn.AdaptiveMaxPool2d((None, 2)),
    "max 3d": lambda: nn.AdaptiveMaxPool3d(2),
    "average 1d": lambda: nn.AdaptiveAvgPool1d(4),
    "indices": lambda: nn.AdaptiveMaxPool2d(2, return_indices=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    x = torch.randn(2, 20, *(9, 10, 11)[: {"max 3d": 3, "average 1d": 1}.get(name, 2)])
    check_module(MODULES[name]().eval(), x, [last(x)[0]])


FUNCTIONS: dict[str, tuple[Any, bool]] = {
    "average": (lambda x: F.adaptive_avg_pool2d(x, 1), True),
    "named": (lambda x: F.adaptive_avg_pool2d(input=x, output_size=(None, 4)), True),
    "max": (lambda x: F.adaptive_max_pool2d(x, (2, 3)), True),
    "1d": (lambda x: F.adaptive_avg_pool1d(x.flatten(2), 3) + F.adaptive_max_pool1d(x.flatten(2), 3), True),
    "indices": (lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)[0], False),
    "nothing": (lambda x: F.adaptive_avg_pool2d(x, 0), False),
    "one image": (lambda x: F.adaptive_avg_pool2d(x[0], 2), False),
    "mean": (lambda x: x.mean((2, 3)), True),
    "mean of an image": (lambda x: torch.mean(x, dim=[-1, -2], keepdim=True), True),
    "mean, named": (lambda x: torch.mean(input=x, dim=(3, 2)), True),
    "mean of all": (lambda x: x.mean(), False),
    "mean of volumes": (lambda x: x.unflatten(3, (-1, 1)).mean((2, 3, 4)), True),
    "mean of lines": (lambda x: x.mean(3), False),
    "mean of channels": (lambda x: x.mean((1, 2)), False),
    "mean in another dtype": (lambda x: x.mean((2, 3), dtype=torch.float64).float(), False),
    "mean of matrices": (lambda x: (x @ x.transpose(2, 3)).mean((2, 3)), True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_in_recorded_forwards(name: str, dtype: torch.dtype) -> None:
    pool, ours = FUNCTIONS[name]
    check_in_recorded_forward(pool, dtype, ours=ours)


@torch.no_grad()
def test_it_is_a_step_of_a_chain_and_its_size_is_watched() -> None:
    source = nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(20, 8, 1)).eval()
    model = xopt.optimize(source)
    x = last(torch.randn(2, 3, 9, 10))
    pools: list[Any] = [source[2], model[2]]
    for size in (1, (2, 3), (None, 2), 1):
        for pool in pools:
            pool.output_size = size
        for _ in range(3):
            torch.testing.assert_close(model(x), source(x), rtol=1e-4, atol=1e-5)
    with torch.profiler.profile() as taken:
        model(x)
    assert [event.name for event in taken.events() if event.name.startswith("xopt::")] == [
        "xopt::conv",
        "xopt::adaptive_pool",
        "xopt::conv",
    ]
