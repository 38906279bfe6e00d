"""The convolutions that the bench measures: every distinct one of ResNet-50 and of Stable Diffusion's UNet.

Written C x H x W : N x K x K / stride, with K // 2 of padding; a + says that the model adds a residual to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from xopt.bench.errors import BenchError

DTYPES = ("f32", "bf16")
QUICK_STEP = 3

MODEL_CONVS: dict[str, tuple[str, ...]] = {
    "ResNet-50": (
        "3x224x224:64x7x7/2",
        "64x56x56:64x1x1",
        "64x56x56:64x3x3",
        "64x56x56:256x1x1+",
        "256x56x56:64x1x1",
        "256x56x56:128x1x1",
        "128x56x56:128x3x3/2",
        "128x28x28:512x1x1+",
        "256x56x56:512x1x1/2",
        "512x28x28:128x1x1",
        "128x28x28:128x3x3",
        "512x28x28:256x1x1",
        "256x28x28:256x3x3/2",
        "256x14x14:1024x1x1+",
        "512x28x28:1024x1x1/2",
        "1024x14x14:256x1x1",
        "256x14x14:256x3x3",
        "1024x14x14:512x1x1",
        "512x14x14:512x3x3/2",
        "512x7x7:2048x1x1+",
        "1024x14x14:2048x1x1/2",
        "2048x7x7:512x1x1",
        "512x7x7:512x3x3",
    ),
    "SD 1.5 UNet": (
        "4x64x64:320x3x3",
        "320x64x64:320x3x3+",
        "320x64x64:320x1x1+",
        "320x64x64:320x3x3/2",
        "320x32x32:640x3x3",
        "640x32x32:640x3x3+",
        "320x32x32:640x1x1",
        "640x32x32:640x1x1+",
        "640x32x32:640x3x3/2",
        "640x16x16:1280x3x3",
        "1280x16x16:1280x3x3+",
        "640x16x16:1280x1x1",
        "1280x16x16:1280x1x1+",
        "1280x16x16:1280x3x3/2",
        "1280x8x8:1280x3x3+",
        "1280x8x8:1280x1x1+",
        "2560x8x8:1280x3x3",
        "2560x8x8:1280x1x1",
        "2560x16x16:1280x3x3",
        "2560x16x16:1280x1x1",
        "1920x16x16:1280x3x3",
        "1920x16x16:1280x1x1",
        "1280x32x32:1280x3x3",
        "1920x32x32:640x3x3",
        "1920x32x32:640x1x1",
        "1280x32x32:640x3x3",
        "1280x32x32:640x1x1",
        "960x32x32:640x3x3",
        "960x32x32:640x1x1",
        "640x64x64:640x3x3",
        "960x64x64:320x3x3",
        "960x64x64:320x1x1",
        "640x64x64:320x3x3",
        "640x64x64:320x1x1",
        "320x64x64:4x3x3",
    ),
}


@dataclass(frozen=True)
class ConvShape:
    channels: int
    height: int
    width: int
    out_channels: int
    kernel: int
    stride: int = 1
    ends_block: bool = False
    """A residual is added to it, in its model."""
    batch: int = 1
    model: str = field(default="", compare=False)

    def __str__(self) -> str:
        images = f"{self.batch}x" if self.batch > 1 else ""
        stride = f"/{self.stride}" if self.stride > 1 else ""
        weight = f"{self.out_channels}x{self.kernel}x{self.kernel}{stride}"
        return f"{images}{self.channels}x{self.height}x{self.width}:{weight}{'+' if self.ends_block else ''}"

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def out_size(self) -> tuple[int, int]:
        height, width = ((size + 2 * self.padding - self.kernel) // self.stride + 1 for size in self._size)
        return height, width

    @property
    def _size(self) -> tuple[int, int]:
        return self.height, self.width

    # ---- The product that it is -------------------------------------------------------------------------------------

    @property
    def m(self) -> int:
        return self.batch * self.out_size[0] * self.out_size[1]

    @property
    def n(self) -> int:
        return self.out_channels

    @property
    def k(self) -> int:
        return self.channels * self.kernel**2

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k


def all_convs(batch: int = 1) -> list[ConvShape]:
    return [parse_conv(text, batch, model) for model, texts in MODEL_CONVS.items() for text in texts]


def quick_convs(batch: int = 1) -> list[ConvShape]:
    """Every third of each model's, from its first on: not chosen for what comes out."""
    return [parse_conv(text, batch, model) for model, texts in MODEL_CONVS.items() for text in texts[::QUICK_STEP]]


_PATTERN = re.compile(r"(\d+)x(\d+)x(\d+):(\d+)x(\d+)x(\d+)(?:/(\d+))?(\+?)")


def parse_conv(text: str, batch: int = 1, model: str = "") -> ConvShape:
    match = _PATTERN.fullmatch(text.strip())
    sizes = [int(size or 1) for size in match.groups()[:7]] if match else [0]
    if match is None or 0 in sizes or sizes[4] != sizes[5]:
        raise BenchError(
            f"--convs: '{text}' is not a convolution; expected CxHxW:NxKxK/stride of positive numbers, such as"
            " 64x56x56:128x3x3/2, with + at its end for one that a residual is added to"
        )
    channels, height, width, out, kernel, _, stride = sizes
    return ConvShape(channels, height, width, out, kernel, stride, bool(match[8]), batch, model)


def parse_convs(text: str, batch: int = 1) -> list[ConvShape]:
    shapes = [parse_conv(part, batch) for part in text.split(",") if part.strip()]
    if not shapes:
        raise BenchError("--convs: no convolution was given; expected a list such as 64x56x56:64x3x3,64x56x56:256x1x1+")
    return list(dict.fromkeys(shapes))
