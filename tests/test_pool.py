"""xopt::pool and the modules that use it, against torch in float64."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import xopt  # noqa: F401 - registers the operator
from tests import cases
from tests.cases import DTYPES
from tests.conv_cases import LAYOUTS, image, joined, last, numbers
from tests.families import Family
from tests.pool_checks import check_in_recorded_forward, check_module, expect_pooled
from xopt.ops.fakes import FLOATING

Tensor = torch.Tensor
ops = torch.ops.xopt


@dataclass(frozen=True)
class PoolCase:
    seed: int = 0
    kind: str = "max"
    images: int = 1
    size: str = "5x5"
    channels: int = 1
    kernel: str = "3x3"
    stride: str = "1x1"
    padding: str = "0x0"
    dilation: str = "1x1"
    input: str = "f32"
    values: str = "normal"
    layout: str = "channels_last"
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int = 0


def sample(rng: random.Random) -> PoolCase:
    dims, kind = rng.choice((1, 2, 2, 2, 3)), rng.choice(("max", "average"))
    kernel = [rng.choice((1, 2, 2, 3, 3, 5)) for _ in range(dims)]
    dilation = [rng.choice((1, 1, 2)) if kind == "max" else 1 for _ in range(dims)]
    span = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    return PoolCase(
        seed=rng.randrange(1_000_000),
        kind=kind,
        images=rng.choice((1, 1, 2, 3, 0)),
        size=joined([least + rng.choice((0, 1, 2, 9)) for least in span]),
        channels=max(1, cases.pick_size(rng)),
        kernel=joined(kernel),
        stride=joined([rng.choice((1, 2, 3, 7)) for _ in range(dims)]),
        padding=joined([rng.randint(0, k // 2) for k in kernel]),
        dilation=joined(dilation),
        input=rng.choice(cases.FLOATS),
        values=rng.choice(("normal", "integers", "zeros", "tiny", "specials" if kind == "max" else "mixed")),
        layout=cases.pick(rng, LAYOUTS),
        ceil_mode=rng.random() < 0.4,
        count_include_pad=rng.random() < 0.5,
        divisor=rng.choice((0, 0, 0, 3)) if kind == "average" and dims > 1 else 0,
    )


def exact(case: PoolCase, x: Tensor) -> Tensor:
    kernel, stride, padding = (numbers(text) for text in (case.kernel, case.stride, case.padding))
    dims = len(kernel)
    if case.kind == "max":
        pool = [F.max_pool1d, F.max_pool2d, F.max_pool3d][dims - 1]
        return pool(x, kernel, stride, padding, numbers(case.dilation), ceil_mode=case.ceil_mode)
    options = {} if case.divisor == 0 else {"divisor_override": case.divisor}
    average: Any = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d][dims - 1]
    return average(x, kernel, stride, padding, case.ceil_mode, case.count_include_pad, **options)  # type: ignore[no-any-return]


def check(case: PoolCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.images, case.channels, *numbers(case.size))
    x = image(case.values, shape, DTYPES[case.input], generator, case.layout)
    got = ops.pool(
        x,
        case.kind,
        kernel_size=numbers(case.kernel),
        stride=numbers(case.stride),
        padding=numbers(case.padding),
        dilation=numbers(case.dilation),
        ceil_mode=case.ceil_mode,
        count_include_pad=case.count_include_pad,
        divisor=case.divisor,
    )
    terms = int(torch.tensor(numbers(case.kernel)).prod())
    expect_pooled(got, x, case.kind, functools.partial(exact, case), terms)


FAMILY = Family("pool", PoolCase, sample, check)


def test_cases(case_batch: list[PoolCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_is_the_maximum_wherever_it_is(dtype: torch.dtype, sign: float) -> None:
    for place in range(9):
        x = torch.full((1, 40, 3, 3), float("-inf"), dtype=dtype)
        x.view(1, 40, 9)[..., place] = torch.tensor(float("nan")).copysign(torch.tensor(sign))
        x.view(1, 40, 9)[..., (place + 1) % 9] = float("inf")
        got = ops.pool(last(x), "max", kernel_size=[3, 3], stride=[1, 1], padding=[0, 0], dilation=[1, 1])
        assert bool(got.isnan().all())


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_maximum_of_infinities_zeros_and_the_smallest_numbers(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    least = limits.smallest_normal
    values = [-torch.inf, limits.min, -1.0, -least, 0.0, least, 1.0, limits.max, torch.inf]
    for count in range(1, len(values) + 1):
        x = torch.tensor([values[:count]], dtype=dtype).expand(33, -1)[None]
        for line in (x, x.flip(-1)):
            got = ops.pool(last(line), "max", kernel_size=[count], stride=[1], padding=[0], dilation=[1])
            assert bool((got == values[count - 1]).all())


def call(x: Tensor, kind: str = "max", **options: Any) -> Tensor:
    geometry = {"kernel_size": [3, 3], "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    return torch.as_tensor(ops.pool(x, kind, **(geometry | options)))


X = torch.randn(2, 8, 6, 6)
ERRORS: dict[str, tuple[Any, str]] = {
    "kind": (lambda: call(X, "min"), "kind: expected one of max, average, norm, got 'min'"),
    "dimensions": (lambda: call(X[0, 0]), r"input: expected 3 to 5 dimensions .*got shape \[6, 6\]"),
    "window": (lambda: call(X[..., :2]), "input: expected at least 3 elements.* dimension 1, got 2 with padding"),
    "padding": (lambda: call(X, padding=[2, 0]), r"padding: expected at most half .* 3, got \[2, 0\]"),
    "negative": (lambda: call(X, padding=[-1, 0]), r"padding: expected numbers of at least 0, got \[-1, 0\]"),
    "count": (lambda: call(X, stride=[1]), "stride: expected 2 numbers, got 1"),
    "dilation": (
        lambda: call(X, "average", dilation=[2, 1]),
        r"dilation: expected 1 for an average or a norm, got \[2, 1\]",
    ),
    "dtype": (lambda: call(X.long()), "input: expected dtype .*, got int64"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    make, message = ERRORS[name]
    with pytest.raises(RuntimeError, match="xopt::pool: " + message):
        make()


MODULES = {
    "max": lambda: nn.MaxPool2d(3, 2, 1),
    "average": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False, ceil_mode=True),
    "max 3d": lambda: nn.MaxPool3d((1, 2, 2)),
    "average 1d": lambda: nn.AvgPool1d(4),
    "indices": lambda: nn.MaxPool2d(2, return_indices=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    dims = {"max 3d": 3, "average 1d": 1}.get(name, 2)
    check_module(MODULES[name]().eval(), torch.randn(2, 20, *(9, 10, 11)[:dims]))


FUNCTIONS: dict[str, tuple[Any, bool]] = {
    "max": (lambda x: F.max_pool2d(x, 3, 2, 1), True),
    "max, named": (lambda x: F.max_pool2d(x, kernel_size=(3, 2), padding=(1, 0), dilation=2, ceil_mode=True), True),
    "torch.max": (lambda x: torch.max_pool2d(x, [2], [2]), True),
    "average": (lambda x: F.avg_pool2d(x, (3, 3), stride=(2, 1), padding=1, count_include_pad=False), True),
    "average of one": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), True),
    "1d": (lambda x: F.max_pool1d(x.flatten(2), 3) + F.avg_pool1d(x.flatten(2), 3), True),
    "indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], False),
    "one image": (lambda x: F.max_pool2d(x[0], 2), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_in_recorded_forwards(name: str, dtype: torch.dtype) -> None:
    pool, ours = FUNCTIONS[name]
    check_in_recorded_forward(pool, dtype, ours=ours)
