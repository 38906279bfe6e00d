"""A convolution to measure: random operands, images with their channels last, and the check of a result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from xopt.bench.conv_shapes import ConvShape
from xopt.bench.errors import WrongResultError
from xopt.bench.problem import CHECKED_COLUMNS, CHECKED_ROWS, SEED, TORCH_DTYPES, check_sample, random_values, sample


@dataclass(frozen=True)
class ConvWeight:
    dtype: str
    shape: ConvShape
    values: Tensor
    """[out_channels, channels, kernel, kernel]"""
    bias: Tensor

    @property
    def bytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True)
class ConvProblem:
    dtype: str
    shape: ConvShape
    weight: ConvWeight
    input: Tensor
    residual: Tensor

    @property
    def bytes(self) -> int:
        """What has to move at least: the weight, the input and the output, once each."""
        return self.weight.bytes + self.input.nbytes + self.residual.nbytes


def make_conv_weight(dtype: str, shape: ConvShape) -> ConvWeight:
    size = (shape.out_channels, shape.channels, shape.kernel, shape.kernel)
    bias = random_values((shape.out_channels,), TORCH_DTYPES[dtype], SEED)
    return ConvWeight(dtype, shape, random_values(size, TORCH_DTYPES[dtype], SEED + 1), bias)


def make_conv_problem(weight: ConvWeight, shape: ConvShape) -> ConvProblem:
    def image(channels: int, height: int, width: int, seed: int) -> Tensor:
        values = random_values((shape.batch, channels, height, width), TORCH_DTYPES[weight.dtype], seed)
        return values.contiguous(memory_format=torch.channels_last)

    residual = image(shape.out_channels, *shape.out_size, SEED + 3)
    return ConvProblem(
        weight.dtype, shape, weight, image(shape.channels, shape.height, shape.width, SEED + 2), residual
    )


def check_conv(problem: ConvProblem, result: Tensor, epilogue: str = "none") -> None:
    """As `problem.check_result`, on a few positions and channels; the first and the last position are corners."""
    shape = problem.shape
    expected_shape, dtype = problem.residual.shape, TORCH_DTYPES[problem.dtype]
    if result.shape != expected_shape or result.dtype != dtype:
        raise WrongResultError(
            f"{shape}: got {list(result.shape)} of {result.dtype}, expected {list(expected_shape)} of {dtype}"
        )
    positions = sample(shape.m, CHECKED_ROWS)
    columns = sample(shape.n, CHECKED_COLUMNS)
    padded = functional.pad(problem.input, [shape.padding] * 4)
    patches = []
    for position in positions.tolist():
        image, inside = divmod(position, shape.out_size[0] * shape.out_size[1])
        y, x = (shape.stride * at for at in divmod(inside, shape.out_size[1]))
        patches.append(padded[image, :, y : y + shape.kernel, x : x + shape.kernel].reshape(-1))
    rows = result.movedim(1, -1).reshape(shape.m, shape.n)
    residual = problem.residual.movedim(1, -1).reshape(shape.m, shape.n)
    check_sample(
        str(shape),
        rows,
        (positions, columns),
        (torch.stack(patches).double(), problem.weight.values.flatten(1)[columns].double()),
        (problem.weight.bias[columns].double(), residual[positions][:, columns].double()),
        epilogue,
    )
