"""xopt::batch_norm against a float64 reference, and how blocks come to use it."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests import cases, reference
from tests.cases import DTYPES
from tests.conv_cases import LAYOUTS, image, joined, numbers
from tests.families import Family, calls_of, expect_values
from tests.test_chain_programs import lengths_of_chains
from tests.test_linear import sample_activation

ops: Any = torch.ops.xopt


@dataclass(frozen=True)
class BatchNormCase:
    seed: int = 0
    images: int = 1
    size: str = "5x5"  # empty: rows of channels
    channels: int = 1
    input: str = "f32"
    out: str = ""
    layout: str = "channels_last"
    offset: float = 0.0  # of the input and the mean
    statistics: str = "f32"
    weight: str = ""
    bias: str = ""
    eps: float = 1e-5
    activation: str = "none"
    alpha: float = 0.0
    beta: float = 0.0
    binary: str = "none"
    other: str = "f32"
    other_layout: str = "channels_last"
    activation_last: bool = False


def sample(rng: random.Random) -> BatchNormCase:
    dims = rng.choice((0, 1, 2, 2, 3))
    fields: dict[str, Any] = {
        "seed": rng.randrange(2**31),
        "images": rng.choice((1, 1, 2, 3, 0)),
        "size": joined([rng.choice((1, 2, 3, 7, 12, 20)) for _ in range(dims)]),
        "channels": rng.choice((1, 2, 3, 7, 8, 16, 17, 33, 64, 100)),
        "input": rng.choice(cases.FLOATS),
        "out": rng.choice(("", "", *cases.FLOATS)),
        "layout": cases.pick(rng, LAYOUTS) if dims else "channels_last",
        "offset": rng.choice((0.0, 0.0, 3.0, 100.0)),
        "statistics": rng.choice(cases.FLOATS),
        "weight": rng.choice(("", *cases.FLOATS)),
        "bias": rng.choice(("", *cases.FLOATS)),
        "eps": rng.choice((1e-5, 1e-3, 0.1)),
    }
    if rng.random() < 0.6:
        fields.update(sample_activation(rng))
    if rng.random() < 0.4:
        fields.update(binary=rng.choice(("add", "mul")), other=rng.choice(cases.FLOATS))
        fields.update(other_layout=cases.pick(rng, LAYOUTS) if dims else "channels_last")
        fields.update(activation_last=rng.random() < 0.5)
    return BatchNormCase(**fields)


def check(case: BatchNormCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    size = numbers(case.size) if case.size else []
    shape = (case.images, case.channels, *size)
    x = image("normal", shape, DTYPES[case.input], generator, case.layout)
    x = x if case.layout == "expanded" else x.add_(case.offset)

    def vector(name: str) -> Tensor | None:
        return cases.tensor("normal", (case.channels,), DTYPES[name], generator) if name else None

    mean, variance, weight, bias = map(vector, (case.statistics, case.statistics, case.weight, case.bias))
    assert mean is not None
    assert variance is not None
    mean, variance = mean + case.offset, variance.abs()
    other = None
    if case.binary != "none":
        other = image("normal", shape, DTYPES[case.other], generator, case.other_layout)
    names = ("eps", "activation", "alpha", "beta", "binary", "activation_last")
    options = {name: getattr(case, name) for name in names} | {"out_dtype": DTYPES[case.out] if case.out else None}
    got = ops.batch_norm(x, mean, variance, weight, bias, other=other, **options)

    sigma = (variance.double() + reference.single(case.eps)).sqrt()
    factor = 1 / sigma if weight is None else weight.double() / sigma
    scale = reference.exact(factor).with_value(factor, 4 * reference.U32 * factor.abs())
    distance = reference.add(reference.exact(rows(x.double())), -mean.double())
    normed = reference.multiply_estimates(distance, scale)
    expected = reference.epilogue(case, normed, bias, None if other is None else rows(other))
    out_dtype = DTYPES[case.out or case.input]
    expect_values("the output", got.movedim(1, -1), expected, (case.images, *size, case.channels), out_dtype)


def rows(x: Tensor) -> Tensor:
    """[images * positions, channels]"""
    return x.movedim(1, -1).reshape(math.prod((x.shape[0], *x.shape[2:])), x.shape[1])


FAMILY = Family("batch_norm", BatchNormCase, sample, check)


def test_cases(case_batch: list[BatchNormCase]) -> None:
    FAMILY.run_all(case_batch)


AFTER: tuple[dict[str, Any], ...] = (
    {},
    {"weight": "f32", "binary": "add", "activation": "relu", "activation_last": True},
)


@pytest.mark.sanitize
def test_tails() -> None:
    FAMILY.run_all(
        BatchNormCase(seed=channels, images=2, size=size, channels=channels, input=dtype, layout=layout, **after)
        for channels in (1, 2, 7, 8, 15, 17, 33)
        for size in ("", "5", "2x3")
        for dtype in cases.FLOATS
        for layout in ("channels_last", "channel_slice")[: 2 if size else 1]
        for after in AFTER
    )


def test_results_do_not_depend_on_the_number_of_threads(torch_threads: None) -> None:
    x, mean, variance = torch.randn(1, 41, 50, 64).movedim(-1, 1), torch.randn(64), torch.rand(64)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(ops.batch_norm(x, mean, variance))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# ---- Blocks ----------------------------------------------------------------------------------------------------------


class Before(nn.Module):
    """Norms before convolutions, as networks of residual blocks and of dense ones have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm1, self.conv1 = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1)
        self.norm2, self.conv2 = nn.BatchNorm2d(32), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(x), 2)
        y = self.conv1(functional.relu(self.norm1(x)))
        return x + self.conv2(functional.leaky_relu(self.norm2(torch.cat((x, y), 1)), 0.2))  # type: ignore[no-any-return]


class After(nn.Module):
    """A norm behind an activation, and what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 16, 4, stride=4), nn.BatchNorm2d(16)
        self.across, self.norm2 = nn.Conv2d(16, 16, 5, padding=2, groups=16), nn.BatchNorm2d(16, affine=False)
        self.point = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(functional.gelu(self.stem(x)))
        return self.point(x + self.norm2(functional.gelu(self.across(x))))  # type: ignore[no-any-return]


class Identity(nn.Module):
    """Branches of one image, of which one is a norm alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.dense = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.alone = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(x), 2)
        return functional.relu(self.norm(self.dense(x)) + self.alone(x))


class Rows(nn.Module):
    """Features that are normed before they are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Linear(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(functional.silu(self.up(x[:, 0, 0]))).tanh())  # type: ignore[no-any-return]


BLOCKS: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {
    Before: ((2, 3, 20, 24), ("max_pool", "batch_norm+relu", "batch_norm+leaky_relu", "conv+add")),
    After: ((2, 3, 20, 24), ("conv+gelu_erf", "batch_norm", "conv+gelu_erf", "batch_norm+add")),
    Identity: ((2, 3, 20, 24), ("max_pool", "batch_norm", "conv+batch_norm+add+relu")),
    Rows: ((5, 1, 1, 12), ("linear+silu", "batch_norm+tanh")),
}


def with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    nn.init.uniform_(tensor, 0.5, 1.5)
    return model.eval()


def error(result: Tensor, truth: Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", BLOCKS)
def test_blocks(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape, fused = BLOCKS[make]
    source, x = with_statistics(make()), torch.randn(shape)
    with torch.no_grad():
        truth = copy.deepcopy(source).double()(x.double())
        plain = copy.deepcopy(source).to(dtype)(x.to(dtype))
        model = xopt.optimize(source, dtype=dtype)
        result = model(x)
        before = norms_run()
        assert error(model(x), truth) <= 1.1 * error(plain, truth) + 2e-7
        assert torch.equal(model(x), result)
    assert norms_run() - before == 2 * sum(name.startswith("batch_norm") for name in fused)
    (fusion,) = xopt.report(model).fusions
    assert fusion.fused == fused
    assert result.is_contiguous()


def norms_run() -> int:
    return calls_of("batch_norm")


def test_a_norm_breaks_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = xopt.optimize(with_statistics(Before()), dtype=torch.float32), lengths_of_chains(monkeypatch)
    with torch.no_grad():
        model(torch.randn(1, 3, 16, 16))
    assert lengths == [7]


def test_statistics_that_change() -> None:
    source = with_statistics(Before())
    model = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(2, 3, 16, 16)
    both: list[Any] = [source, model]
    with torch.no_grad():
        for _ in range(4):
            for each in both:
                each.norm1.running_mean.add_(0.5)
                each.norm2.running_var.mul_(2.0)
                each.norm2.weight.mul_(-1.0)
            torch.testing.assert_close(model(x), source(x), atol=1e-4, rtol=1e-4)


def test_images_in_torchs_layout_and_single_ones() -> None:
    """Of which torch makes no copies, and neither do we."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(20), nn.Conv2d(20, 20, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(functional.relu(self.norm(x)))  # type: ignore[no-any-return]

    source = with_statistics(First())
    model = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(2, 20, 9, 11)
    with torch.no_grad():
        for each in (x, x.contiguous(memory_format=torch.channels_last), x[:1, :, :1].expand(1, 20, 5, 11)):
            result, expected = model(each), source(each)
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
            assert result.stride() == expected.stride()
        with pytest.raises(ValueError, match="expected 4D input"):
            model(x[0])


def test_a_norm_over_the_middle_of_three_dimensions() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(8, 12), nn.BatchNorm1d(5), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]

    source = with_statistics(Tokens())
    model = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for batch in (1, 3, 2):
            x = torch.randn(batch, 5, 8)
            torch.testing.assert_close(model(x), source(x), atol=1e-5, rtol=1e-5)


def test_a_sum_with_what_is_spread_over_it() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.last(self.norm(functional.gelu(self.conv(x))) + y)  # type: ignore[no-any-return]

    source = with_statistics(Spread())
    model = xopt.optimize(source, dtype=torch.float32)
    x = torch.randn(2, 3, 6, 7)
    with torch.no_grad():
        for shape in ((2, 8, 6, 7), (1, 8, 6, 7), (8, 1, 1), (2, 8, 6, 7)):
            y = torch.randn(shape)
            torch.testing.assert_close(model(x, y), source(x, y), atol=1e-5, rtol=1e-5)
