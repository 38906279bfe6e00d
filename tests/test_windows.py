"""xopt::window_partition and window_merge, and the patterns that find them, bit for bit against torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import xopt
from tests import cases
from tests.cases import DTYPES
from tests.conv_cases import LAYOUTS, image, joined, numbers
from tests.families import Family, expect_equal, expect_input_gradients, kernel_calls
from tests.test_optimize_conv import fused_in

Tensor = torch.Tensor
ops = torch.ops.xopt


@dataclass(frozen=True)
class WindowsCase:
    seed: int = 0
    images: int = 1
    size: str = "4x4"
    channels: int = 1
    window: str = "2x2"
    shift: str = "0x0"
    dtype: str = "f32"
    layout: str = "channels_last"


def sample(rng: random.Random) -> WindowsCase:
    dtype = rng.choice(list(DTYPES))
    return WindowsCase(
        seed=rng.randrange(1_000_000),
        images=rng.choice((1, 1, 2, 3, 0)),
        size=joined([rng.choice((1, 2, 3, 5, 7, 8, 14, 17, 0)) for _ in range(2)]),
        channels=cases.pick_size(rng),
        window=joined([rng.choice((1, 2, 3, 4, 7, 9)) for _ in range(2)]),
        shift=joined([rng.choice((0, 0, 1, 3, 9, 40)) for _ in range(2)]),
        dtype=dtype,
        layout=cases.pick(rng, LAYOUTS),
    )


def by_windows(x: Tensor, window: list[int], shift: list[int]) -> Tensor:
    images, height, width, channels = x.shape
    bottom, right = (-length % of for length, of in zip((height, width), window, strict=True))
    padded = F.pad(x, (0, 0, 0, right, 0, bottom)).roll(tuple(shift), (1, 2))
    down, across = padded.shape[1] // window[0], padded.shape[2] // window[1]
    cut = padded.reshape(images, down, window[0], across, window[1], channels)
    return cut.transpose(2, 3).contiguous()


def check(case: WindowsCase) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    size, window = numbers(case.size), numbers(case.window)
    # Either way round, and round more than once.
    shift = [each * sign for each, sign in zip(numbers(case.shift), (1, -1), strict=True)]
    shape = (case.images, case.channels, *size)
    x = image("normal", shape, DTYPES[case.dtype], generator, case.layout).movedim(1, -1)
    got = ops.window_partition(x, window, shift)
    assert got.is_contiguous()
    expect_equal("the windows", got, by_windows(x, window, shift))
    back = [-each for each in shift]
    for windows in (got, cases.laid_out(got, "swapped"), cases.laid_out(got, "k_strided")):
        merged = ops.window_merge(windows, size, back)
        assert merged.is_contiguous()
        expect_equal("the image", merged, x)


FAMILY = Family("windows", WindowsCase, sample, check)


def test_cases(case_batch: list[WindowsCase]) -> None:
    FAMILY.run_all(case_batch)


@pytest.mark.sanitize
def test_tails() -> None:
    FAMILY.run_all(
        WindowsCase(seed=size, images=2, size=f"{size}x{9 - size}", channels=channels, window="3x4", shift=shift)
        for size in range(1, 9)
        for channels in (1, 3, 32)
        for shift in ("0x0", "1x2", "7x5")
    )


def test_threads_do_not_change_results(torch_threads: None) -> None:
    x = torch.randn(4, 30, 29, 64)
    expected = by_windows(x, [7, 7], [-3, -3])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        windows = ops.window_partition(x, [7, 7], [-3, -3])
        assert torch.equal(windows, expected)
        assert torch.equal(ops.window_merge(windows, [30, 29], [3, 3]), x)


X = torch.randn(1, 6, 6, 4)
WINDOWS = torch.randn(1, 2, 3, 3, 2, 4)
ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "dims": (
        lambda: ops.window_partition(X[0], [2, 2], [0, 0]),
        r"partition: image: .* 4 dim.*, got shape \[6, 6, 4\]",
    ),
    "dtype": (lambda: ops.window_partition(X.double(), [2, 2], [0, 0]), "partition: image: .* dtype .*, got float64"),
    "window": (lambda: ops.window_partition(X, [2, 0], [0, 0]), r"window: .* of at least 1, got \[2, 0\]"),
    "windows": (lambda: ops.window_partition(X, [2], [0, 0]), "window: expected 2 numbers, got 1"),
    "shift": (lambda: ops.window_partition(X, [2, 2], [0]), "shift: expected 2 numbers, got 1"),
    "gradient": (lambda: ops.window_partition(X.clone().requires_grad_(), [2, 2], [0, 0]), "requires a gradient"),
    "merged dims": (lambda: ops.window_merge(X, [6, 6], [0, 0]), "merge: windows: expected 6 dimensions"),
    "merged size": (lambda: ops.window_merge(WINDOWS, [7, 6], [0, 0]), "size: expected at most 6, .* got 7"),
    "negative size": (lambda: ops.window_merge(WINDOWS, [6, -1], [0, 0]), r"size: .* at least 0, got \[6, -1\]"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    make, message = ERRORS[name]
    with pytest.raises(RuntimeError, match="xopt::window_.*" + message):
        make()


# ---- Blocks ----------------------------------------------------------------------------------------------------------


class Windowed(nn.Module):
    """As torchvision writes it: sizes of the input alone say how it is padded."""

    def __init__(self, window: int = 4, shift: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.window, self.shift = window, shift

    def inside(self, windows: Tensor) -> Tensor:
        return self.down(self.up(windows).relu())  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        size = self.window
        x = F.pad(x, (0, 0, 0, (size - width % size) % size, 0, (size - height % size) % size))
        _, down, across, _ = x.shape
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        x = x.view(batch, down // size, size, across // size, size, channels).permute(0, 1, 3, 2, 4, 5)
        x = self.inside(x.reshape(-1, size * size, channels))
        x = x.view(batch, down // size, across // size, size, size, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(batch, down, across, channels)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        return x[:, :height, :width, :].contiguous()


class WholeWindows(Windowed):
    """As transformers write it, where images are whole windows."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        size = self.window
        x = x.roll((-self.shift, -self.shift), (-3, -2))
        x = x.view(batch, height // size, size, width // size, size, channels)
        x = x.transpose(2, 3).contiguous().view(-1, size, size, channels).view(-1, size * size, channels)
        x = self.inside(x).view(-1, height // size, width // size, size, size, channels)
        x = x.transpose(2, 3).contiguous().view(-1, height, width, channels)
        return x.roll(shifts=(self.shift, self.shift), dims=(1, 2))


class RolledThenPadded(Windowed):
    """As timm writes it: an image is of whole windows, or a shift would put zeros between its edges."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        size = self.window
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = F.pad(x, (0, 0, 0, (size - width % size) % size, 0, (size - height % size) % size))
        _, down, across, _ = x.shape
        x = x.view(batch, down // size, size, across // size, size, channels).permute(0, 1, 3, 2, 4, 5).contiguous()
        x = self.inside(x.view(-1, size * size, channels))
        x = x.view(-1, down // size, across // size, size, size, channels).permute(0, 1, 3, 2, 4, 5).contiguous()
        x = x.view(-1, down, across, channels)[:, :height, :width, :].contiguous()
        return torch.roll(x, (self.shift, self.shift), (1, 2))


class RolledRows(WholeWindows):
    """Along one dimension only."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        size = self.window
        x = torch.roll(x, 1, 1).view(batch, height // size, size, width // size, size, channels)
        x = self.inside(x.transpose(2, 3))
        return torch.roll(x.transpose(2, 3).reshape(batch, height, width, channels), -1, 1)


class SeenRolled(Windowed):
    """Somebody else wants the rolled image."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        rolled = x.roll((1, 1), (1, 2))
        x = rolled.view(batch, height // 4, 4, width // 4, 4, channels).transpose(2, 3)
        return self.inside(x.reshape(-1, 16, channels)).view(rolled.shape) + rolled


class RolledChannels(Windowed):
    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = x.roll((1, 1), (2, 3)).view(batch, height // 4, 4, width // 4, 4, channels).transpose(2, 3)
        return self.inside(x.reshape(-1, 16, channels))


class TooMuchPadding(Windowed):
    """More than whole windows need, which the operator does not do."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = F.pad(x, (0, 0, 0, 4, 0, 8)).view(batch, height // 4 + 2, 4, width // 4 + 1, 4, channels)
        return self.inside(x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels))


class OtherGrid(Windowed):
    """Not every image that is cut up so has windows of one size."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = x.roll((1, 1), (1, 2)).view(-1, 2, height // 2, 2, width // 2, channels).transpose(2, 3)
        x = self.inside(x.reshape(batch * 4, -1, channels))
        x = x.view(-1, 2, 2, height // 2, width // 2, channels).transpose(2, 3).reshape(batch, height, width, -1)
        return x.roll((-1, -1), (1, 2))


SIZES = ((8, 8), (12, 4))
ODD_SIZES = ((8, 8), (9, 5), (1, 2), (7, 8))
BLOCKS: dict[str, tuple[Callable[[], Windowed], tuple[tuple[int, int], ...], tuple[str, ...]]] = {
    "torchvision": (Windowed, ODD_SIZES, ("pad+roll+windows", "windows+roll+crop")),
    "torchvision, no shift": (lambda: Windowed(shift=0), ODD_SIZES, ("pad+windows", "windows+crop")),
    "transformers": (WholeWindows, SIZES, ("roll+windows", "windows+roll")),
    "timm": (RolledThenPadded, ODD_SIZES, ("pad+roll+windows", "windows+roll+crop")),
    "rows": (RolledRows, SIZES, ("roll+windows", "windows+roll")),
    "seen": (SeenRolled, SIZES, ()),
    "channels": (RolledChannels, SIZES, ()),
    "padding": (TooMuchPadding, SIZES, ("pad+windows",)),
    "other grid": (OtherGrid, SIZES, ("roll+windows", "windows+roll")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_blocks(name: str, dtype: torch.dtype) -> None:
    make, sizes, fused = BLOCKS[name]
    source = make().eval()
    for first in sizes:  # whichever is recorded
        model = xopt.optimize(copy.deepcopy(source), dtype=dtype, sample_input=torch.randn(2, *first, 16))
        assert tuple(label for label in fused_in(model) if "windows" in label) == fused
        for size in sizes:
            for x in (torch.randn(2, *size, 16), torch.randn(1, 16, *size).movedim(1, -1)):
                before = kernel_calls()["windows f32 scalar"]
                result, expected = model(x), source(x)
                ran = kernel_calls()["windows f32 scalar"] - before
                is_in_order = name != "timm" or all(length % source.window == 0 for length in size)
                assert ran == (0 if name == "padding" or not is_in_order else len(fused))
                assert result.is_contiguous()
                torch.testing.assert_close(result, expected, rtol=0.03, atol=0.03 if dtype == torch.bfloat16 else 1e-5)


def test_the_switch_leaves_them_to_torch() -> None:
    model = xopt.optimize(
        Windowed().eval(), config=xopt.Config(fuse_windows=False), sample_input=torch.randn(1, 5, 5, 16)
    )
    assert not any("windows" in label for label in fused_in(model))


def test_a_gradient_passes_them() -> None:
    source: Any = Windowed().eval().requires_grad_(False)
    model = xopt.optimize(source, sample_input=torch.randn(1, 5, 5, 16))
    expect_input_gradients(model, source, torch.ones(1, 6, 5, 16))
