"""What the tests of convolutions and of transposed ones have in common: their cases but for the geometry."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests import cases
from tests.cases import DTYPES
from tests.test_linear import sample_activation

Tensor = torch.Tensor


@dataclass(frozen=True)
class ImageCase:
    seed: int = 0
    images: int = 1
    size: str = "5x5"
    channels: int = 1  # of a group
    out_channels: int = 1  # of a group
    groups: int = 1
    kernel: str = "3x3"
    stride: str = "1x1"
    dilation: str = "1x1"
    packed: str = "f32"
    input: str = "f32"
    weight: str = "f32"
    out: str = ""
    input_values: str = "normal"
    weight_values: str = "normal"
    other_values: str = "normal"
    layout: str = "channels_last"
    weight_layout: str = "contiguous"
    bias: str = ""
    scale: str = ""
    activation: str = "none"
    alpha: float = 0.0
    beta: float = 0.0
    binary: str = "none"
    other: str = "f32"
    other_layout: str = "channels_last"
    activation_last: bool = False


LAYOUTS = {"channels_last": 50, "contiguous": 20, "channel_slice": 10, "image_step": 8, "pixel_step": 6, "expanded": 6}
VALUES = {kind: weight for kind, weight in cases.VALUE_WEIGHTS.items() if kind != "specials"}
_WORK_LIMIT = 600_000


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split("x")]


def joined(values: list[int]) -> str:
    return "x".join(map(str, values))


def is_too_much(case: ImageCase, output_size: Sequence[int]) -> bool:
    total = case.images * case.groups * case.channels * case.out_channels
    for size in (*output_size, *numbers(case.kernel)):
        total *= size
    return total > _WORK_LIMIT


def sample_operands(rng: random.Random, packed: str, input_values: str, weight_values: str) -> dict[str, Any]:
    """All fields but those of the geometry."""
    if "integers" in (input_values, weight_values) and rng.random() < 0.7:
        input_values = weight_values = "integers"
    fields: dict[str, Any] = {
        "seed": rng.randrange(1_000_000),
        "packed": packed,
        "input": packed if rng.random() < 0.6 else rng.choice(cases.FLOATS),
        "weight": packed if rng.random() < 0.6 else rng.choice(cases.FLOATS),
        "out": rng.choice(("", "", *cases.FLOATS)),
        "input_values": input_values,
        "weight_values": weight_values,
        "other_values": "integers" if input_values == weight_values == "integers" else "normal",
        "layout": cases.pick(rng, LAYOUTS),
        "weight_layout": rng.choice(("contiguous", "channels_last", "swapped", "k_strided")),
        "bias": rng.choice(("", *cases.FLOATS)),
        "scale": rng.choice(("", "", *cases.FLOATS)),
    }
    if rng.random() < 0.6:
        fields.update(sample_activation(rng))
    if rng.random() < 0.4:
        fields.update(binary=rng.choice(("add", "mul")), other=rng.choice(cases.FLOATS))
        fields.update(other_layout=cases.pick(rng, LAYOUTS), activation_last=rng.random() < 0.5)
    return fields


def image(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, layout: str) -> Tensor:
    """[images, channels, spatial...] in some layout, amid poison where it is a part of something."""
    x = cases.values(kind, shape, dtype, generator)
    if layout == "contiguous":
        return x
    if layout == "expanded":
        return last(x)[:1].expand(x.shape)
    store_shape = list(shape)
    dim, step = {"channel_slice": (1, 1), "image_step": (0, 2), "pixel_step": (-1, 2)}.get(layout, (0, 1))
    store_shape[dim] = shape[dim] + 5 if layout == "channel_slice" else shape[dim] * step
    store = last(cases.poisoned(store_shape, dtype))
    view = store.narrow(1, 3, shape[1]) if layout == "channel_slice" else store
    if step == 2:
        view = view[::2] if dim == 0 else view[..., ::2]
    return view.copy_(x)


def last(x: Tensor) -> Tensor:
    """The same with the channels last in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@dataclass(frozen=True)
class Operands:
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    other: Tensor | None

    @classmethod
    def of(cls, case: ImageCase, weight_shape: tuple[int, ...], output_size: Sequence[int]) -> Operands:
        generator = torch.Generator().manual_seed(case.seed)
        total = case.groups * case.out_channels
        shape = (case.images, case.groups * case.channels, *numbers(case.size))
        x = image(case.input_values, shape, DTYPES[case.input], generator, case.layout)
        weight = cases.values(case.weight_values, weight_shape, DTYPES[case.weight], generator)
        weight = last(weight) if case.weight_layout == "channels_last" else cases.laid_out(weight, case.weight_layout)
        bias = cases.tensor(case.other_values, (total,), DTYPES[case.bias], generator) if case.bias else None
        scale = cases.tensor(case.other_values, (total,), DTYPES[case.scale], generator) if case.scale else None
        other = None
        if case.binary != "none":
            out_shape = (case.images, total, *output_size)
            other = image(case.other_values, out_shape, DTYPES[case.other], generator, case.other_layout)
        return cls(x, weight, bias, scale, other)

    def after(self, case: ImageCase) -> dict[str, Any]:
        """The operator's arguments for what follows the product."""
        names = ("activation", "alpha", "beta", "binary", "activation_last")
        tensors = {"scale": self.scale, "other": self.other, "out_dtype": DTYPES[case.out] if case.out else None}
        return {name: getattr(case, name) for name in names} | tensors
