"""Images are laid out anew within an optimized model: nothing of it shows outside, and views of theirs stay right."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import xopt

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Counts(nn.Module):
    """Its view is one that torch's layout alone allows, and what it does before is seen from outside."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(20, 24, 3, padding=1)
        self.head = nn.Linear(24 * 16, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor
        self.in_place = in_place

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.in_place:
            image.mul_(2)
        return self.head(functional.relu(self.conv(image)).view(len(image), -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_forward_that_runs_again_for_a_view_has_written_once(in_place: bool) -> None:
    source = Counts(in_place).eval()
    optimized = xopt.optimize(source)
    image = torch.randn(2, 20, 4, 4)
    for _ in range(2):
        theirs, ours = image.clone(), image.clone()
        with torch.no_grad():
            torch.testing.assert_close(optimized(ours), source(theirs))
        assert torch.equal(ours, theirs)
        assert optimized.calls == source.calls


class Writes(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, image: torch.Tensor, out: torch.Tensor) -> None:
        image.add_(1)
        out.copy_(self.conv(image))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [8, 20])
def test_what_is_written_into_an_image_reaches_the_caller(channels: int, mode: str) -> None:
    source = Writes(channels).eval()
    optimized = xopt.optimize(source)
    with MODES[mode]():
        image = torch.randn(2, channels, 5, 5)
        for _ in range(2):
            theirs, ours = (image.clone(), torch.zeros_like(image)), (image.clone(), torch.zeros_like(image))
            source(*theirs)
            optimized(*ours)
            torch.testing.assert_close(ours, theirs)


class Convolves(nn.Module):
    """A convolution of what `before` makes of its input, with what `after` makes of the result."""

    def __init__(self, conv: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        super().__init__()
        self.conv = conv
        self.before, self.after = before, after

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.conv(self.before(x)))


def flattened_unless_huge(x: torch.Tensor) -> torch.Tensor:
    if float(x.sum()) < 1e30:  # no recording takes this
        x = functional.relu(x)
    return x.view(len(x), -1)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def two_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3))


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.float().unflatten(2, (4, 2)))


def through_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).view(x.dtype)


TOKENS, SEQUENCE, IMAGE = (2, 10, 8), (2, 8, 10), (2, 20, 6, 6)
SHAPES: dict[str, tuple[Callable[[], Convolves], tuple[int, ...]]] = {
    "tokens to a sequence": (lambda: Convolves(nn.Conv1d(8, 4, 1), transposed, same), TOKENS),
    "a view of a sequence": (lambda: Convolves(nn.Conv1d(8, 4, 3), transposed, flattened_unless_huge), TOKENS),
    "a view of blocks": (lambda: Convolves(two_convolutions(), transposed, flattened_unless_huge), TOKENS),
    "a view of a sequence as it was": (lambda: Convolves(nn.Conv1d(8, 4, 3), same, flattened_unless_huge), SEQUENCE),
    "complex numbers": (lambda: Convolves(nn.Conv1d(8, 4, 3), same, as_complex), SEQUENCE),
    "bytes": (lambda: Convolves(nn.Conv1d(8, 4, 3), same, through_bytes), SEQUENCE),
    "bytes of an image": (lambda: Convolves(nn.Conv2d(20, 24, 3), same, through_bytes), IMAGE),
    "flattened": (lambda: Convolves(nn.Conv2d(20, 24, 3), same, lambda x: x.flatten(2)), IMAGE),
    "unflattened": (lambda: Convolves(nn.Conv2d(20, 24, 3), same, lambda x: x.unflatten(1, (4, 6))), IMAGE),
    "one of several": (lambda: Convolves(nn.Conv2d(20, 24, 3), lambda x: x[0], same), IMAGE),
    "places in memory": (
        lambda: Convolves(nn.Conv2d(20, 24, 3), same, lambda x: x.as_strided((2, 4, 16), (24 * 16, 16, 1))),
        IMAGE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_results_lie_as_torchs_do(name: str, dtype: torch.dtype) -> None:
    make, shape = SHAPES[name]
    source = make().eval()
    optimized = xopt.optimize(source, dtype=dtype)
    x = torch.randn(shape)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for _ in range(3):
        with torch.no_grad():
            expected, got = source(x), optimized(x)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert got.is_contiguous() or got.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_have_their_channels_last_between_convolutions(dtype: torch.dtype) -> None:
    source = nn.Sequential(nn.Conv1d(20, 24, 3), nn.ReLU(), nn.Conv1d(24, 20, 3)).eval()
    optimized = xopt.optimize(source, dtype=dtype)
    strides: list[int] = []
    optimized[2].register_forward_pre_hook(lambda module, args: strides.append(args[0].stride(1)))
    x = torch.randn(2, 20, 30)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    with torch.no_grad():
        for _ in range(3):
            expected, got = source(x), optimized(x)
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
            assert got.stride() == expected.stride()
    assert set(strides) == {1}


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_of_any_kind_keeps_the_dtype_of_the_callers_autocast(mode: Any, dtype: torch.dtype) -> None:
    def sure(module: nn.Module, args: Any, result: Any) -> None:
        """Somebody looks on, so that the forward runs as it is."""

    source = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, padding_mode=mode)).eval()
    source[1].register_forward_hook(sure)
    optimized = xopt.optimize(source, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(1, 8, 6, 6)
        assert optimized(x).dtype == source(x).dtype == torch.bfloat16


class Mixer(nn.Module):
    """Tokens between convolutions, as attention in a VAE's decoder."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 24, 3, padding=1), nn.Conv2d(24, channels, 3, padding=1)
        self.linear = nn.Linear(24, 24)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        image = functional.silu(self.first(image))
        batch, channels, height, width = image.shape
        tokens = self.linear(image.flatten(2).transpose(1, 2)).transpose(1, 2)
        return self.second(tokens.reshape(batch, channels, height, width).contiguous())  # type: ignore[no-any-return]


class Coder(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.encoder, self.decoder = Mixer(channels), Mixer(channels)

    def decode(self, image: torch.Tensor) -> torch.Tensor:
        return self.decoder(image)  # type: ignore[no-any-return]

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encoder(image))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("channels", [4, 20])
def test_other_methods_answer_as_the_source_does(channels: int, copied: bool) -> None:
    source = Coder(channels).eval()
    optimized = xopt.optimize(source)
    if copied:
        optimized = copy.deepcopy(optimized)
    image = torch.randn(2, channels, 6, 6)
    for _ in range(2):
        with torch.no_grad():
            for expected, got in ((source.decode(image), optimized.decode(image)), (source(image), optimized(image))):
                torch.testing.assert_close(got, expected)
                assert got.stride() == expected.stride()


class OfSeveral(nn.Module):
    """As detectors take their images: of different sizes, in a list or by names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3))
        self.head = nn.Conv2d(24, 4, 1)
        self.strides: list[int] = []

    def forward(self, images: Any) -> Any:
        images = list(images.values()) if isinstance(images, dict) else images
        size = max(image.shape[-1] for image in images)
        batch = torch.stack([functional.pad(image, (0, size - image.shape[-1])) for image in images])
        assert float(batch.sum()) != 0  # no recording knows that
        features = self.body(batch)
        self.strides.append(features.stride(1))
        return OrderedDict(features=features, logits=[self.head(features)])


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_in_containers_have_their_channels_last_inside(dtype: torch.dtype, by_name: bool) -> None:
    source = OfSeveral().eval()
    optimized = xopt.optimize(source, dtype=dtype)
    images: Any = [torch.randn(3, 12, 12), torch.randn(3, 12, 9)]
    images = dict(enumerate(images)) if by_name else images
    with torch.no_grad():
        for _ in range(3):
            result, exact = optimized(images), source(images)
    assert type(result) is OrderedDict
    assert list(result) == ["features", "logits"]
    for got, known in ((result["features"], exact["features"]), (result["logits"][0], exact["logits"][0])):
        assert float((got - known).norm() / known.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)
        assert got.stride() == known.stride()
    assert set(optimized.strides) == {1}


def test_containers_of_the_standard_library_are_looked_into() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)])

        def forward(self, maps: OrderedDict[str, torch.Tensor]) -> OrderedDict[str, Any]:
            found = [functional.relu(conv(image)) for conv, image in zip(self.convs, maps.values(), strict=True)]
            return OrderedDict([*zip(maps.keys(), found, strict=True), ("both", (found[0] + found[1],))])

    source = nn.ModuleDict({"pyramid": Pyramid()}).eval()
    optimized: Any = xopt.optimize(source, dtype=torch.float32)
    with torch.no_grad():
        for names in ("ab", "ab", "ba", "ab"):
            maps = OrderedDict((name, torch.randn(1, 8, 6, 6)) for name in names)
            result, exact = optimized["pyramid"](maps), source["pyramid"](maps)
            assert type(result) is OrderedDict
            assert list(result) == list(exact) == [*names, "both"]
            for name in names:
                torch.testing.assert_close(result[name], exact[name], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(result["both"][0], exact["both"][0], rtol=1e-4, atol=1e-5)
    (fusion,) = xopt.report(optimized).fusions
    assert fusion.fused == ("conv+relu", "conv+relu")
