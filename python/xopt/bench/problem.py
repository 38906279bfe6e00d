"""A GEMM to measure: random operands, and the check that a contender gets the right result before it is timed.

The operands of an fp32 or bf16 problem are normal, those of an int8 one are uniform over all of u8 and s8. Results are
compared with float64 on a few rows and columns; the tolerance follows from the dtype and K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xopt.bench.errors import WrongResultError
from xopt.bench.shapes import Shape

SEED = 20
CHECKED_ROWS = 4
CHECKED_COLUMNS = 128
INPUT_SCALE = 0.02
INPUT_ZERO_POINT = 117

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
OUTPUT_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}
EPILOGUES = ("none", "bias_gelu", "bias_residual")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


@dataclass(frozen=True)
class Weight:
    """W[n, k] of a layer, in the dtype of the products."""

    dtype: str
    values: Tensor
    scale: Tensor  # int8: one per output column; else empty
    bias: Tensor

    @property
    def bytes(self) -> int:
        return self.values.nbytes


def make_weight(dtype: str, n: int, k: int) -> Weight:
    generator = _generator()
    bias = torch.randn(n, generator=generator)
    if dtype == "int8":
        values = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
        scale = torch.rand(n, generator=generator) * 0.009 + 0.001
        return Weight(dtype, values, scale, bias)
    values = torch.randn(n, k, generator=generator).to(TORCH_DTYPES[dtype])
    return Weight(dtype, values, torch.empty(0), bias.to(TORCH_DTYPES[dtype]))


@dataclass(frozen=True)
class Problem:
    dtype: str
    shape: Shape
    weight: Weight
    input: Tensor
    residual: Tensor
    input_scale: Tensor = field(default_factory=lambda: torch.tensor([INPUT_SCALE]))
    input_zero_point: Tensor = field(default_factory=lambda: torch.tensor([INPUT_ZERO_POINT], dtype=torch.int32))

    @property
    def output_dtype(self) -> torch.dtype:
        return OUTPUT_DTYPES[self.dtype]

    @property
    def bytes(self) -> int:
        """What has to move at least: the weight, the input and the output, once each."""
        return self.weight.bytes + self.input.nbytes + self.shape.m * self.shape.n * self.output_dtype.itemsize


def make_problem(weight: Weight, shape: Shape) -> Problem:
    generator = _generator().manual_seed(SEED + 1)
    if weight.dtype == "int8":
        values = torch.randint(0, 256, (shape.m, shape.k), dtype=torch.uint8, generator=generator)
    else:
        values = torch.randn(shape.m, shape.k, generator=generator).to(TORCH_DTYPES[weight.dtype])
    residual = torch.randn(shape.m, shape.n, generator=generator).to(OUTPUT_DTYPES[weight.dtype])
    return Problem(dtype=weight.dtype, shape=shape, weight=weight, input=values, residual=residual)


def in_bf16(problem: Problem, weight: Weight | None = None) -> Problem:
    """The problem that a bf16 model would have in the place of an int8 one; `weight`, if it is there already."""
    shape = problem.shape
    return make_problem(weight or make_weight("bf16", shape.n, shape.k), shape)


def random_values(size: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(size, generator=_generator().manual_seed(seed)).to(dtype)


def sample(count: int, wanted: int) -> Tensor:
    """Indices below `count`: the first, the last and random ones between."""
    if count <= wanted:
        return torch.arange(count)
    inner = torch.randint(0, count, (wanted - 2,), generator=_generator())
    return torch.cat([torch.tensor([0, count - 1]), inner])


def _float64_operands(problem: Problem, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    left, right = problem.input[rows].double(), problem.weight.values[columns].double()
    if problem.dtype == "int8":
        scales = problem.weight.scale[columns].double().unsqueeze(1) * problem.input_scale.double()
        return left - problem.input_zero_point, right * scales
    return left, right


_POST: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda products, bias, residual: products,
    "bias_gelu": lambda products, bias, residual: torch.nn.functional.gelu(products + bias),
    "bias_residual": lambda products, bias, residual: products + bias + residual,
    "bias_residual_relu": lambda products, bias, residual: (products + bias + residual).relu(),
}


def check_result(problem: Problem, result: Tensor, epilogue: str = "none") -> None:
    """Raises WrongResultError unless `result` is finite and close to the float64 reference where it is sampled."""
    shape = problem.shape
    if result.shape != (shape.m, shape.n) or result.dtype != problem.output_dtype:
        raise WrongResultError(
            f"{shape}: got {list(result.shape)} of {result.dtype}, "
            f"expected {[shape.m, shape.n]} of {problem.output_dtype}"
        )
    rows, columns = sample(shape.m, CHECKED_ROWS), sample(shape.n, CHECKED_COLUMNS)
    added = (problem.weight.bias[columns].double(), problem.residual[rows][:, columns].double())
    check_sample(str(shape), result, (rows, columns), _float64_operands(problem, rows, columns), added, epilogue)


def check_sample(
    name: str,
    result: Tensor,
    at: tuple[Tensor, Tensor],
    operands: tuple[Tensor, Tensor],
    added: tuple[Tensor, Tensor],
    epilogue: str,
) -> None:
    """Of a result [m, n] the rows and columns `at`, against the float64 operands and what an epilogue adds there."""
    if not bool(result.sum(dtype=torch.float32).isfinite()):
        raise WrongResultError(f"{name}: the result has values that are not finite")
    (rows, columns), (left, right), (bias, residual) = at, operands, added
    expected = _POST[epilogue](left @ right.t(), bias, residual)
    # Worst rounding of K additions in fp32 in any order, then that of storing the result and of its parts.
    accumulation = (left.shape[1] + 8) * 2.0**-24 * (left.abs() @ right.abs().t() + bias.abs() + residual.abs())
    storage = 2.0**-7 if result.dtype == torch.bfloat16 else 2.0**-20
    stored = expected.abs() if epilogue == "none" else torch.maximum(expected.abs(), bias.abs() + residual.abs())
    difference = (result[rows][:, columns].double() - expected).abs()
    excess = difference - 1.2 * accumulation - storage * stored
    if bool((excess > 0).any()):
        row, column = divmod(int(excess.argmax()), len(columns))
        raise WrongResultError(
            f"{name}: off by {float(difference[row, column]):.3g} at row {int(rows[row])}, "
            f"column {int(columns[column])}, where {float(expected[row, column]):.6g} is expected"
        )
