"""xopt::group_norm against the float64 reference of a norm over rows, and how blocks come to use it."""

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
from tests.conv_cases import LAYOUTS, image, joined, last, numbers
from tests.families import Family, expect_values
from tests.test_chain_programs import lengths_of_chains

ops = torch.ops.xopt


@dataclass(frozen=True)
class GroupNormCase:
    seed: int = 0
    images: int = 1
    size: str = "5x5"
    groups: int = 1
    width: int = 1  # channels of a group
    input: str = "f32"
    out: str = ""
    layout: str = "channels_last"
    offset: float = 0.0  # added to the input: a mean far from 0, which squares about zero do not survive
    weight: str = ""
    bias: str = ""
    eps: float = 1e-5
    activation: str = "none"
    shift: str = ""
    shift_of_all: bool = False  # one for all images


def sample(rng: random.Random) -> GroupNormCase:
    return GroupNormCase(
        seed=rng.randrange(2**31),
        images=rng.choice((1, 1, 2, 3, 0)),
        size=joined([rng.choice((1, 2, 3, 7, 12, 20)) for _ in range(rng.choice((1, 2, 2, 3)))]),
        groups=rng.choice((1, 1, 2, 3, 8, 32)),
        width=rng.choice((1, 2, 3, 4, 10, 16, 33)),
        input=rng.choice(cases.FLOATS),
        out=rng.choice(("", "", *cases.FLOATS)),
        layout=cases.pick(rng, LAYOUTS),
        offset=rng.choice((0.0, 0.0, 3.0, 100.0)),
        weight=rng.choice(("", *cases.FLOATS)),
        bias=rng.choice(("", *cases.FLOATS)),
        eps=rng.choice((1e-5, 1e-6, 0.1)),
        activation=rng.choice(("none", "silu", "relu")),
        shift=rng.choice(("", "", *cases.FLOATS)),
        shift_of_all=rng.random() < 0.5,
    )


def check(case: GroupNormCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    channels, size = case.groups * case.width, numbers(case.size)
    x = image("normal", (case.images, channels, *size), DTYPES[case.input], generator, "contiguous")
    x = (x + case.offset).to(DTYPES[case.input])
    store = image("normal", tuple(x.shape), DTYPES[case.input], generator, case.layout)
    x = store if case.layout == "expanded" else store.copy_(x)
    weight, bias = (
        cases.tensor("normal", (channels,), DTYPES[name], generator) if name else None
        for name in (case.weight, case.bias)
    )
    out_dtype = DTYPES[case.out] if case.out else None
    shift = None
    if case.shift:
        shift_shape = (1 if case.shift_of_all else case.images, channels)
        shift = cases.tensor("normal", shift_shape, DTYPES[case.shift], generator)
    got = ops.group_norm(
        x, case.groups, weight, bias, eps=case.eps, activation=case.activation, out_dtype=out_dtype, shift=shift
    )  # fmt: skip
    # A group of an image is a row; its weights differ along it.
    positions = math.prod(size)
    moved = x.double().reshape(case.images, channels, positions)
    moved = moved if shift is None else moved + shift.double()[:, :, None]
    rows = moved.reshape(case.images * case.groups, case.width * positions)
    normed = reference.row_norm(reference.exact(rows), "layer_norm", None, None, case.eps)
    columns = by_channel(normed, case, channels, positions)
    if weight is not None:
        columns = reference.multiply(columns, weight.double())
    columns = reference.activate(
        reference.add_bias(columns, bias), case.activation, 0.0, 0.0, DTYPES[case.out or case.input]
    )
    in_memory = (case.images, *size, channels)
    expect_values("the output", got.movedim(1, -1), columns, in_memory, DTYPES[case.out or case.input])


def by_channel(rows: reference.Estimate, case: GroupNormCase, channels: int, positions: int) -> reference.Estimate:
    """[images * groups, width * positions] as [images * positions, channels]."""

    def moved(x: Tensor) -> Tensor:
        return x.reshape(case.images, channels, positions).transpose(1, 2).reshape(-1, channels)

    return reference.Estimate(moved(rows.value), moved(rows.error), moved(rows.nan_allowed), moved(rows.unchecked))


FAMILY = Family("group_norm", GroupNormCase, sample, check)


def test_cases(case_batch: list[GroupNormCase]) -> None:
    FAMILY.run_all(case_batch)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, before = last(torch.randn(1, 64, 50, 41)), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(ops.group_norm(x, 8))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


X = torch.randn(2, 8, 3, 3)
ERRORS: dict[str, tuple[Any, str]] = {
    "groups": (lambda: ops.group_norm(X, 3), "groups: expected a divisor of the 8 channels, got 3"),
    "shift": (
        lambda: ops.group_norm(X, 2, shift=torch.zeros(3, 8)),
        r"shift: expected shape \[1 or 2, 8\], got \[3, 8\]",
    ),
    "shift of other channels": (
        lambda: ops.group_norm(X, 2, shift=torch.zeros(2, 4)),
        r"shift: expected shape \[1 or 2, 8\], got \[2, 4\]",
    ),
    "shift's dtype": (lambda: ops.group_norm(X, 2, shift=torch.zeros(2, 8).double()), "shift: expected dtype"),
    "no groups": (lambda: ops.group_norm(X, 0), "groups: expected a divisor of the 8 channels, got 0"),
    "dimensions": (lambda: ops.group_norm(X[0, 0], 1), "input: expected 3 to 5 dimensions"),
    "weight": (lambda: ops.group_norm(X, 2, torch.ones(2)), r"weight: expected shape \[8\], got \[2\]"),
    "eps": (lambda: ops.group_norm(X, 2, eps=-1.0), "eps: expected a number of at least 0, got -1"),
    "activation": (lambda: ops.group_norm(X, 2, activation="tanh"), "activation: expected one of none, relu, silu"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(RuntimeError, match="xopt::group_norm: " + message):
        call()


class ResnetBlock(nn.Module):
    """As in diffusers' UNet."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(16, channels)
        self.norm2, self.conv2 = nn.GroupNorm(32, channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(time))[:, :, None, None]
        return x + self.conv2(functional.silu(self.norm2(y)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_block_of_a_unet(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, x, time = ResnetBlock().eval(), torch.randn(2, 64, 20, 24), torch.randn(2, 16)
    with torch.no_grad():
        exact_result = copy.deepcopy(source).double()(x.double(), time.double())
        plain = copy.deepcopy(source).to(dtype)(x.to(dtype), time.to(dtype))
        model = xopt.optimize(source, dtype=dtype)
        result = model(x, time)
    errors = [float((each.double() - exact_result).norm() / exact_result.norm()) for each in (result, plain)]
    assert errors[0] <= 1.1 * errors[1]
    assert result.is_contiguous()
    (fusion,) = xopt.report(model).fusions
    assert fusion.fused == ("group_norm+silu", "add+group_norm+silu", "conv+add")


class Stylized(nn.Module):
    """As in networks that transfer a style."""

    def __init__(self, norm: type[nn.Module], conv: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(3, 20, 3, padding=1), conv(20, 20, 3, padding=1)
        self.norm1, self.norm2 = norm(20, **options), norm(20, **options)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.leaky_relu(self.norm2(self.conv2(y))) + y


INSTANCE_NORMS: dict[str, tuple[Any, Any, tuple[int, ...], dict[str, Any]]] = {
    "1d": (nn.InstanceNorm1d, nn.Conv1d, (2, 3, 40), {"affine": True}),
    "2d": (nn.InstanceNorm2d, nn.Conv2d, (2, 3, 11, 14), {}),
    "2d affine": (nn.InstanceNorm2d, nn.Conv2d, (2, 3, 11, 14), {"affine": True}),
    "3d": (nn.InstanceNorm3d, nn.Conv3d, (1, 3, 5, 6, 7), {"affine": True}),
    "statistics": (nn.InstanceNorm2d, nn.Conv2d, (2, 3, 11, 14), {"affine": True, "track_running_stats": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", INSTANCE_NORMS)
def test_instance_norm(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, conv, shape, options = INSTANCE_NORMS[name]
    source, x = Stylized(norm, conv, **options), torch.randn(shape)
    for each in (source.norm1, source.norm2):
        for tensor in (*each.parameters(), *each.buffers()):
            if tensor.is_floating_point():
                nn.init.uniform_(tensor, 0.5, 1.5)
    source.eval()
    with torch.no_grad():
        exact_result = copy.deepcopy(source).double()(x.double())
        plain = copy.deepcopy(source).to(dtype)(x.to(dtype))
        model = xopt.optimize(source, dtype=dtype)
        result = model(x)
    errors = [float((each.double() - exact_result).norm() / exact_result.norm()) for each in (result, plain)]
    assert errors[0] <= 1.1 * errors[1] + 1.2e-7
    (fusion,) = xopt.report(model).fusions
    if name == "statistics":
        assert fusion.fused == ("conv+batch_norm+relu", "conv+batch_norm+leaky_relu")
    elif len(shape) == 4:
        assert fusion.fused == ("instance_norm+relu", "instance_norm")


def test_instance_norm_of_one_position() -> None:
    model = xopt.optimize(Stylized(nn.InstanceNorm2d, nn.Conv2d).eval())
    with torch.no_grad():
        model(torch.randn(1, 3, 4, 4))
        with pytest.raises(ValueError, match="Expected more than 1 spatial element"):
            model(torch.randn(1, 3, 1, 1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            hidden = conv(functional.silu(norm(hidden)))
        return x + hidden


class Shifted(nn.Module):
    """As a time's embedding comes into a UNet."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.conv, self.project = nn.Conv2d(6, 16, 3, padding=1), nn.Linear(5, 16)
        self.norm, self.written = nn.GroupNorm(4, 16), written

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        image, shift = self.conv(x), self.project(time)
        if self.written == "getitem":
            image = image + shift[:, :, None, None]
        elif self.written == "unsqueeze":
            image = shift.unsqueeze(-1).unsqueeze(-1) + image
        elif self.written == "view":
            image = torch.add(image, shift.view(shift.shape[0], -1, 1, 1))
        elif self.written == "scaled":
            image = torch.add(image, shift[:, :, None, None], alpha=2)
        elif self.written == "used twice":
            image = image + shift[:, :, None, None]
            image = image + functional.silu(self.norm(image))
        result: Tensor = functional.silu(self.norm(image))
        return result


@pytest.mark.parametrize("written", ["getitem", "unsqueeze", "view", "scaled", "used twice"])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_what_is_added_to_each_channel_before(written: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    source = Shifted(written).eval()
    optimized = xopt.optimize(source)
    with torch.no_grad():
        for images, times in ((2, 2), (2, 1), (1, 1), (3, 3), (1, 4), (2, 2)):
            x, time = torch.randn(images, 6, 5, 5).contiguous(memory_format=layout), torch.randn(times, 5)
            torch.testing.assert_close(optimized(x, time), source(x, time), rtol=1e-4, atol=1e-5)
    fused = {step for fusion in xopt.report(optimized).fusions for step in fusion.fused}
    assert ("add+group_norm+silu" in fused) == (written in ("getitem", "unsqueeze", "view"))


def test_an_image_of_one_pixel_is_no_vector() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Conv2d(6, 16, 1), nn.Conv2d(6, 16, 1), nn.GroupNorm(4, 16)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.norm(self.first(x) + self.second(x))
            return result

    source = Sum().eval()
    optimized = xopt.optimize(source)
    with torch.no_grad():
        for size in (1, 1, 3, 1):
            x = last(torch.randn(2, 6, size, size))
            torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)


def test_norms_and_convolutions_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """For images whose channels are last in memory; torch's own norm takes others as they are."""
    lengths = lengths_of_chains(monkeypatch)
    torch.manual_seed(0)
    source = Residual().eval()
    optimized = xopt.optimize(source)
    with torch.no_grad():
        for images, size in ((2, 9), (1, 6), (3, 1), (2, 9)):
            for layout in (torch.channels_last, torch.contiguous_format):
                x = torch.randn(images, 16, size, size).contiguous(memory_format=layout)
                torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)
    assert max(lengths) == 4
