"""xopt::upsample and the modules that use it, against torch: bit for bit where values are chosen, else in float64."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import xopt
from tests import cases, reference
from tests.cases import DTYPES
from tests.conv_cases import LAYOUTS, image, joined, last, numbers
from tests.families import Family, expect_equal, expect_values, kernel_calls
from tests.test_optimize_conv import ROUNDING, fused_in, settled

Tensor = torch.Tensor
ops = torch.ops.xopt
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
SCALES = ("scale_d", "scale_h", "scale_w")


@dataclass(frozen=True)
class UpsampleCase:
    seed: int = 0
    mode: str = "nearest"
    images: int = 1
    size: str = "5x5"
    to: str = ""  # a size, or
    factors: str = ""  # factors
    channels: int = 1
    align_corners: bool = False
    input: str = "f32"
    values: str = "normal"
    layout: str = "channels_last"


def sample(rng: random.Random) -> UpsampleCase:
    dims, mode = rng.choice((1, 2, 2, 2, 3)), rng.choice(("nearest", "nearest-exact", "linear", "linear"))
    size = [rng.choice((1, 2, 3, 5, 8, 13)) for _ in range(dims)]
    factors = [rng.choice((1.0, 2.0, 2.0, 3.0, 0.5, 1.5, 1.9, 2.7, 0.7)) for _ in range(dims)]
    to = [rng.choice((1, 2, length, 2 * length, 4 * length, 7, 20)) for length in size]
    scaled = rng.random() < 0.5 and all(int(length * factor) > 0 for length, factor in zip(size, factors, strict=True))
    return UpsampleCase(
        seed=rng.randrange(1_000_000),
        mode=mode,
        images=rng.choice((1, 1, 2, 3, 0)),
        size=joined(size),
        to="" if scaled else joined(to),
        factors="x".join(map(str, factors)) if scaled else "",
        channels=max(1, cases.pick_size(rng)),
        align_corners=mode == "linear" and rng.random() < 0.5,
        input=rng.choice(cases.FLOATS),
        values=rng.choice(("normal", "integers", "zeros", "tiny", "mixed" if mode == "linear" else "specials")),
        layout=cases.pick(rng, LAYOUTS),
    )


def by_torch(case: UpsampleCase, x: Tensor) -> Tensor:
    """With one image at least, which torch wants."""
    linear = case.mode == "linear"
    some = x if case.images else torch.zeros((1, *x.shape[1:]), dtype=x.dtype)
    options: dict[str, Any] = {"align_corners": case.align_corners} if linear else {}
    if case.to:
        options["size"] = numbers(case.to)
    else:
        options["scale_factor"] = [float(factor) for factor in case.factors.split("x")]
    mode = LINEAR[len(numbers(case.size))] if linear else case.mode
    return functional.interpolate(some, mode=mode, **options)[: case.images]


def by_xopt(case: UpsampleCase, x: Tensor) -> Tensor:
    dims = x.dim() - 2
    if case.to:
        return torch.as_tensor(ops.upsample(x, numbers(case.to), case.mode, align_corners=case.align_corners))
    factors = [float(factor) for factor in case.factors.split("x")]
    to = [int(length * factor) for length, factor in zip(x.shape[2:], factors, strict=True)]
    scales = dict(zip(SCALES[-dims:], factors, strict=True))
    return torch.as_tensor(ops.upsample(x, to, case.mode, align_corners=case.align_corners, **scales))


def check(case: UpsampleCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.images, case.channels, *numbers(case.size))
    dtype = DTYPES[case.input]
    x = image(case.values, shape, dtype, generator, case.layout)
    got = by_xopt(case, x).movedim(1, -1)
    if case.mode != "linear":
        assert got.is_contiguous()
        expect_equal("the output", got, by_torch(case, last(x)).movedim(1, -1))
        return
    value = by_torch(case, x.contiguous().double())
    # The weights, which are rounded once, and sums of up to eight products.
    error = by_torch(case, x.contiguous().double().abs()) * 12 * reference.U32 + 8 * reference.DENORMAL
    if not case.images:
        error = value
    rows, errors = (each.movedim(1, -1).reshape(-1, case.channels) for each in (value, error))
    never = torch.zeros_like(rows, dtype=torch.bool)
    in_memory = (case.images, *value.shape[2:], case.channels)
    expect_values("the output", got, reference.Estimate(rows, errors, never, never), in_memory, dtype)


FAMILY = Family("upsample", UpsampleCase, sample, check)


def test_cases(case_batch: list[UpsampleCase]) -> None:
    FAMILY.run_all(case_batch)


X = torch.randn(2, 8, 6, 6)
ERRORS: dict[str, tuple[Any, str]] = {
    "mode": (lambda: ops.upsample(X, [3, 3], "cubic"), "mode: expected one of nearest, nearest-exact, linear, got 'cu"),
    "dimensions": (lambda: ops.upsample(X[0, 0], [3], "linear"), r"input: expected 3 to 5 dimensions .*\[6, 6\]"),
    "count": (lambda: ops.upsample(X, [3], "linear"), "size: expected 2 numbers, got 1"),
    "size": (lambda: ops.upsample(X, [3, 0], "linear"), r"size: expected numbers of at least 1, got \[3, 0\]"),
    "empty": (lambda: ops.upsample(X[..., :0], [3, 3], "linear"), "input: expected at least 1 element along .* 1"),
    "scale": (lambda: ops.upsample(X, [3, 3], "linear", scale_w=-1.0), "scale: expected numbers above 0, got -1"),
    "dtype": (lambda: ops.upsample(X.long(), [3, 3], "linear"), "input: expected dtype .*, got int64"),
    "gradient": (lambda: ops.upsample(X.clone().requires_grad_(), [3, 3], "nearest"), "input: requires a gradient"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    make, message = ERRORS[name]
    with pytest.raises(RuntimeError, match="xopt::upsample: " + message):
        make()


# ---- Modules and blocks ----------------------------------------------------------------------------------------------


def used_kernels(model: nn.Module, x: Tensor) -> tuple[Tensor, set[str]]:
    before = kernel_calls()
    with torch.no_grad():
        result = model(x)
    return result, {record.split()[0] for record, count in kernel_calls().items() if count > before[record]}


MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "nearest": (lambda: nn.Upsample(scale_factor=2), (2, 20, 5, 7)),
    "nearest 1d": (lambda: nn.Upsample(scale_factor=1.5), (2, 20, 9)),
    "nearest-exact": (lambda: nn.Upsample(size=(9, 4), mode="nearest-exact"), (2, 20, 5, 7)),
    "bilinear": (lambda: nn.Upsample(scale_factor=(2, 1.5), mode="bilinear"), (2, 20, 5, 7)),
    "recomputed": (
        lambda: nn.Upsample(scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
        (2, 20, 5, 7),
    ),
    "align_corners": (lambda: nn.UpsamplingBilinear2d(size=(11, 3)), (2, 20, 5, 7)),
    "trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), (1, 20, 3, 4, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, dtype: torch.dtype) -> None:
    make, shape = MODULES[name]
    source, x = make().eval(), torch.randn(shape).to(dtype)
    model = xopt.optimize(copy.deepcopy(source))
    assert type(model) is not nn.Upsample
    assert isinstance(model, nn.Upsample)
    for each in (x, last(x), last(x)[:, 3:]):
        result, used = used_kernels(model, each)
        assert torch.allclose(result, source(each), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
        assert ("upsample" in used) == (each is not x)
    leaf = last(x.float()).requires_grad_()
    model(leaf).sum().backward()
    assert leaf.grad is not None


class Up(nn.Module):
    """As in the decoders of diffusion models."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.conv = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 5, 3, padding=1)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        options = self.options or {"size": (x.shape[2] + 3, 17), "mode": "bilinear"}
        return self.conv(functional.interpolate(x, **options))  # type: ignore[no-any-return]


OPTIONS: dict[str, dict[str, Any]] = {
    "nearest": {"scale_factor": 2.0, "mode": "nearest"},
    "a size of the input's": {},
    "corners": {"scale_factor": 2.0, "mode": "bilinear", "align_corners": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_between_convolutions(name: str) -> None:
    source = Up(**OPTIONS[name]).eval()
    model = xopt.optimize(source)
    for size in ((9, 8), (12, 13)):
        x = torch.randn(2, 3, *size)
        result, used = used_kernels(model, x)
        assert torch.allclose(result, source(x), atol=1e-5)
        assert "upsample" in used or name == "nearest"
        x = last(x)
        with torch.no_grad():
            model(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
            model(x)
        assert "aten::copy_" not in {event.name for event in profile.events()}, "there was a change of layout"
    assert fused_in(model) == (["conv+relu", "upsample+conv"] if name == "nearest" else ["conv+relu", "upsample"])


class Doubled(nn.Module):
    """A convolution of an image of twice the size, with all that may follow it."""

    def __init__(self, dims: int, mode: str = "nearest") -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.first, self.second, self.last = conv(3, 24, 1), conv(24, 37, 3, padding=1), conv(37, 37, 3, padding=1)
        self.norm, self.up = norm(37), nn.Upsample(scale_factor=2, mode=mode)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.second(self.up(self.first(x)))) + y)
        return self.last(functional.interpolate(x, scale_factor=2.0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_of_an_image_of_twice_the_size(dims: int) -> None:
    source = settled(Doubled(dims))
    model = xopt.optimize(source)
    for size in ((5, 4, 3), (1, 7, 2), (1, 1, 1)):
        x = last(torch.randn(2, 3, *size[:dims]))
        y = torch.randn(2, 37, *(2 * each for each in size[:dims]))
        with torch.no_grad():
            exact = copy.deepcopy(source).double()(x.double(), y.double())
            errors = [float((each(x, y).double() - exact).norm() / exact.norm()) for each in (model, source)]
        assert errors[0] <= 1.1 * errors[1] + ROUNDING
    assert fused_in(model) == ["upsample+conv+batch_norm+add+relu", "upsample+conv"]
    plain = Doubled(dims, "nearest-exact").eval()
    exact_model = xopt.optimize(plain)
    with torch.no_grad():
        assert torch.allclose(exact_model(x, y), plain(x, y), atol=1e-5)


def test_sums_of_weights_follow_the_weights() -> None:
    source = settled(Doubled(2))
    model, x, y = xopt.optimize(source), last(torch.randn(1, 3, 4, 5)), torch.randn(1, 37, 8, 10)

    def check(one: nn.Module, other: nn.Module) -> None:
        with torch.no_grad():
            assert torch.allclose(one(x, y), other(x, y), atol=1e-4)

    check(model, source)
    check(copy.deepcopy(model), source)
    assert list(model.state_dict()) == list(source.state_dict())
    for each in (model, source):
        with torch.no_grad():
            each.second.weight.mul_(2.0)
    check(model, source)
    changed = {name: value + 0.01 for name, value in source.state_dict().items() if value.is_floating_point()}
    for each in (model, source):
        each.load_state_dict(changed, strict=False)
    check(model, source)
    leaf = x.clone().requires_grad_()
    model(leaf, y).sum().backward()
    assert leaf.grad is not None


def test_sums_of_rounded_weights_are_asked_for() -> None:
    source, x, y = settled(Doubled(2)), last(torch.randn(1, 3, 9, 8)), torch.randn(1, 37, 18, 16)
    for asked in (False, True):
        model = xopt.optimize(source, dtype=torch.bfloat16, config=xopt.Config(fuse_upsample_rounded=asked))
        with torch.no_grad():
            exact = copy.deepcopy(source).double()(x.double(), y.double())
            theirs = copy.deepcopy(source).bfloat16()(x.bfloat16(), y.bfloat16())
            errors = [float((each.double() - exact).norm() / exact.norm()) for each in (model(x, y), theirs)]
        assert errors[0] <= (1.3 if asked else 1.1) * errors[1]
        assert ("upsample+conv" in fused_in(model)) == asked


def test_left_to_torch() -> None:
    others: list[dict[str, Any]] = [
        {"scale_factor": 2.0, "mode": "bicubic"},
        {"scale_factor": 0.5, "mode": "bilinear", "antialias": True},
        {"size": (4, 4), "mode": "area"},
    ]
    for options in others:
        source, x = Up(**options).eval(), torch.randn(2, 3, 12, 12)
        model = xopt.optimize(source)
        result, used = used_kernels(model, x)
        assert torch.allclose(result, source(x), atol=1e-5)
        assert "upsample" not in used
    assert any("its mode is bicubic" in entry.detail for entry in bicubic_entries())
    with pytest.raises(ValueError, match="align_corners option can only be set"):
        xopt.optimize(nn.Upsample(scale_factor=2, align_corners=True).eval())(last(X))
    model = xopt.optimize(Up(scale_factor=2.0).eval(), config=xopt.Config(upsample_images=False))
    assert "upsample" not in used_kernels(model, torch.randn(1, 3, 8, 8))[1]


def bicubic_entries() -> Any:
    model = xopt.optimize(nn.Sequential(nn.Upsample(scale_factor=2, mode="bicubic"), nn.Conv2d(3, 4, 1)).eval())
    return xopt.report(model).entries
