"""Float64 references for the GEMM family, independent of xopt, each with a bound on the error that is allowed.

A reference is an `Estimate`: for every element the exact value, and how far an fp32 computation may lie from it. The
bounds are derived and not tuned: u = 2^-24 a rounding, gamma(K) = K u / (1 - K u) for a sum of K products in any order,
Lipschitz constants for activations. A rounding that is provably exact (integers that fit, zeros) counts nothing, so
integer-valued cases are compared exactly. `acceptable` then rounds both ends of [value - error, value + error] to the
output's dtype: rounding is monotone, so a right kernel lies between them, and nothing else does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own habit)

from tests.cases import DTYPES

Tensor = torch.Tensor

U32 = 2.0**-24  # half the distance between 1 and the next fp32: one rounding to nearest
DENORMAL = 2.0**-149  # what an underflow in fp32 may cost
SMALLEST_NORMAL = 2.0**-126  # what flushing a denormal may cost
MAX_F32 = 3.4028234663852886e38
OVERFLOW = 2.0**126  # magnitudes above this may overflow on the way in fp32, whatever the result
TRANSCENDENTAL_RELATIVE = 4 * 2.0**-23  # allowed approximation error of an activation: 4 ulp of fp32 ...
TRANSCENDENTAL_ABSOLUTE = 1e-6  # ... plus this
# What sigmoids may err by on their way into bf16, whose rounding is ten times as much: an exp and a reciprocal.
ROUGH = frozenset({"silu", "sigmoid", "gelu_tanh", "quick_gelu"})
ROUGH_RELATIVE = 7.5e-5 + 2.0**-14

INTEGER_RANGE = {torch.int8: (-128.0, 127.0), torch.uint8: (0.0, 255.0)}


@dataclass
class Estimate:
    """Elementwise: exact value, bound of the fp32 error, where NaN is as good, and what cannot be checked."""

    value: Tensor
    error: Tensor
    nan_allowed: Tensor
    unchecked: Tensor

    def with_value(self, value: Tensor, error: Tensor) -> Estimate:
        error = torch.where(torch.isfinite(value), error, torch.zeros_like(error))
        shape = value.shape
        return Estimate(value, error, self.nan_allowed.expand(shape), self.unchecked.expand(shape))


def exact(value: Tensor) -> Estimate:
    """What is known without an error."""
    never = torch.zeros_like(value, dtype=torch.bool)
    return Estimate(value, torch.zeros_like(value), never, never)


def representable(value: Tensor) -> Tensor:
    return value.to(torch.float32).to(torch.float64) == value


def after_rounding(value: Tensor, error: Tensor, roundings: int = 1) -> Tensor:
    """The error after `roundings` fp32 roundings of something within `error` of `value`; none if that is exact."""
    more = error * (1 + roundings * U32) + roundings * U32 * value.abs() * (1 + U32) + DENORMAL
    return torch.where((error == 0) & representable(value), torch.zeros_like(error), more)


def single(number: float) -> float:
    """A scalar argument as the kernel holds it."""
    return float(torch.tensor(number, dtype=torch.float32))


def matmul(a: Tensor, w: Tensor, flushes: bool) -> Estimate:
    """a [m, k] times w [n, k] transposed, both already in float64 and rounded to what the kernel multiplies."""
    k = a.shape[1]
    value = a @ w.T
    magnitude = a.abs() @ w.abs().T
    terms = k + 4
    gamma = terms * U32 / (1 - terms * U32)
    error = gamma * magnitude + k * DENORMAL
    if flushes:
        # Hardware dot products of bf16 take denormals for zero, on the way in and on the way out.
        tiny_a = torch.where(a.abs() <= SMALLEST_NORMAL, a, 0.0).abs()
        tiny_w = torch.where(w.abs() <= SMALLEST_NORMAL, w, 0.0).abs()
        flushed = tiny_a @ finite(w).abs().T + finite(a).abs() @ tiny_w.T
        error = error + flushed + k * SMALLEST_NORMAL
    if is_integral(a) and is_integral(w):
        # Sums of integers below 2^24 are exact in every order.
        error = torch.where(magnitude <= 2.0**24, torch.zeros_like(error), error)
    else:
        # So are a single product that needs no rounding, and nothing but zeros.
        alone = (a != 0).double() @ (w != 0).double().T <= 1
        normal = (value == 0) | (value.abs() >= SMALLEST_NORMAL)
        exact = alone & representable(value) & normal & (magnitude == value.abs())
        exact = exact & (flushed == 0) if flushes else exact
        error = torch.where(exact, torch.zeros_like(error), error)
    unchecked = torch.isfinite(value) & (magnitude >= OVERFLOW)
    nan_allowed = torch.zeros_like(unchecked)
    return Estimate(value, torch.where(torch.isfinite(value), error, 0.0), nan_allowed, unchecked)


def finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))


def is_integral(x: Tensor) -> bool:
    return bool((torch.isfinite(x) & (x == x.round())).all())


def int8_matmul(
    a: Tensor, a_zero: Tensor | None, a_scale: Tensor, w: Tensor, w_zero: Tensor | None, w_scale: Tensor
) -> Estimate:
    """Integer products, exact, then dequantised: two fp32 scales and the conversion of the sum are three roundings."""
    a64 = a.double() - (0 if a_zero is None else a_zero.double().reshape(-1, 1))
    w64 = w.double() - (0 if w_zero is None else w_zero.double().reshape(-1, 1))
    total = a64 @ w64.T  # below 2^53: exact
    value = total * a_scale.double().reshape(-1, 1) * w_scale.double().reshape(1, -1)
    scales = torch.cat([a_scale.reshape(-1), w_scale.reshape(-1)]).double()
    powers_of_two = bool((torch.frexp(scales).mantissa.abs() == 0.5).all()) if scales.numel() else True
    error = 3 * U32 * value.abs() * (1 + 4 * U32) + DENORMAL
    exact = (total == 0) | (representable(total) & representable(value) if powers_of_two else total == 0)
    false = torch.zeros_like(value, dtype=torch.bool)
    return Estimate(value, torch.where(exact, 0.0, error), false, false)


# ---- Epilogue ------------------------------------------------------------------------------------------------------


def add_bias(x: Estimate, bias: Tensor | None) -> Estimate:
    return x if bias is None else add(x, bias.double())


def add(x: Estimate, other: Tensor) -> Estimate:
    value = x.value + other
    return x.with_value(value, after_rounding(value, x.error.expand(value.shape)))


def multiply(x: Estimate, other: Tensor) -> Estimate:
    value = x.value * other
    error = torch.where(x.error == 0, x.error, x.error * other.abs())
    product = Estimate(value, error, x.nan_allowed, x.unchecked | anything_times_infinity(x, other))
    return product.with_value(value, after_rounding(value, error))


def anything_times_infinity(x: Estimate, other: Tensor) -> Tensor:
    """Where x may be on either side of zero, or zero, its product with an infinity may be anything."""
    return torch.isinf(other) & (x.error > 0) & (x.value.abs() <= x.error)


def multiply_estimates(x: Estimate, y: Estimate) -> Estimate:
    value = x.value * y.value
    left, right = finite(x.value).abs(), finite(y.value).abs()
    error = left * y.error + right * x.error + x.error * y.error
    undecided = anything_times_infinity(x, y.value) | anything_times_infinity(y, x.value)
    both = Estimate(value, error, x.nan_allowed | y.nan_allowed, x.unchecked | y.unchecked | undecided)
    return both.with_value(value, after_rounding(value, error))


def hardsigmoid(x: Tensor) -> Tensor:
    return (x / 6 + 0.5).clamp(0, 1)


# name -> (function of x, alpha, beta; Lipschitz constant; is it more than a comparison; is its limit at -inf 0)
Function = Callable[[Tensor, float, float], Tensor]
ACTIVATIONS: dict[str, tuple[Function, float, bool, bool]] = {
    "none": (lambda x, _a, _b: x, 1.0, False, False),
    "relu": (lambda x, _a, _b: torch.relu(x), 1.0, False, False),
    "gelu_erf": (lambda x, _a, _b: F.gelu(x), 1.13, True, True),
    "gelu_tanh": (lambda x, _a, _b: F.gelu(x, approximate="tanh"), 1.13, True, True),
    "silu": (lambda x, _a, _b: F.silu(x), 1.1, True, True),
    "sigmoid": (lambda x, _a, _b: torch.sigmoid(x), 0.25, True, False),
    "tanh": (lambda x, _a, _b: torch.tanh(x), 1.0, True, False),
    "hardswish": (lambda x, _a, _b: x * hardsigmoid(x), 1.5, True, True),
    "hardsigmoid": (lambda x, _a, _b: hardsigmoid(x), 1 / 6, True, False),
    "quick_gelu": (lambda x, _a, _b: x * torch.sigmoid(single(1.702) * x), 1.1, True, True),
    "leaky_relu": (lambda x, a, _b: torch.where(x < 0, x * a, x), 1.0, False, False),
    "clamp": (lambda x, a, b: x.clamp(a, b), 1.0, False, False),
}


def activate(x: Estimate, name: str, alpha: float, beta: float, out: torch.dtype | None = None) -> Estimate:
    """`out`: what the result is stored as, where it is known."""
    function, lipschitz, approximated, vanishes = ACTIVATIONS[name]
    alpha, beta = single(alpha), single(beta)
    value = function(x.value, alpha, beta)
    nan_allowed = x.nan_allowed
    if vanishes:
        # The limit at -inf is 0, while the formula, and torch with it, says -inf * 0: both are right.
        value = torch.where(x.value == -math.inf, -0.0, value)
        nan_allowed = nan_allowed | (x.value < -MAX_F32)
    error = x.error * lipschitz
    if name == "leaky_relu":
        error = x.error * max(1.0, abs(alpha))
        error = torch.where(x.value - x.error < 0, after_rounding(value, error), error)
    if approximated:
        relative = TRANSCENDENTAL_RELATIVE
        if out == torch.bfloat16 and name in ROUGH:
            relative += ROUGH_RELATIVE
        error = error + relative * value.abs() + TRANSCENDENTAL_ABSOLUTE
    activated = Estimate(value, error, nan_allowed, x.unchecked)
    return activated.with_value(value, error)


def combine(x: Estimate, binary: str, other: Tensor | None) -> Estimate:
    if binary == "none" or other is None:
        return x
    return add(x, other.double()) if binary == "add" else multiply(x, other.double())


def activate_as(case: Any, x: Estimate) -> Estimate:
    """As a case of a product has it."""
    return activate(x, case.activation, case.alpha, case.beta, DTYPES[case.out or case.input])


def epilogue(case: Any, product: Estimate, bias: Tensor | None, other: Tensor | None) -> Estimate:
    """What a case has after its product."""
    x = add_bias(product, bias)
    if case.activation_last:
        return activate_as(case, combine(x, case.binary, other))
    return combine(activate_as(case, x), case.binary, other)


def row_norm(x: Estimate, kind: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Estimate:
    """LayerNorm, RMSNorm or unit norm of each row; the variance is allowed the error of two passes, not that of one."""
    n = x.value.shape[-1]
    if n == 0:
        return x
    eps = single(eps)
    gamma = (n + 4) * U32
    if kind == "layer_norm":
        mean = x.value.mean(-1, keepdim=True)
        centred = x.value - mean
        mean_error = x.error.mean(-1, keepdim=True) + gamma * x.value.abs().mean(-1, keepdim=True)
        error = x.error + mean_error + U32 * centred.abs()
    else:
        centred, error = x.value, x.error
    if kind == "unit_norm":
        sigma = centred.square().sum(-1, keepdim=True).sqrt().clamp_min(eps)
        sigma_error, least_sigma = error.square().sum(-1, keepdim=True).sqrt(), eps
    else:
        sigma = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        sigma_error, least_sigma = error.square().mean(-1, keepdim=True).sqrt(), math.sqrt(eps)
    normed = centred / sigma
    # |sigma' - sigma| is at most the root mean square (or the root) of the errors; then some roundings of its own.
    sigma_error = sigma_error + gamma * sigma
    least = torch.maximum(sigma - sigma_error, torch.full_like(sigma, least_sigma * (1 - gamma)))
    error = (error + normed.abs() * sigma_error) / least + 4 * U32 * normed.abs() + DENORMAL
    error = torch.where(torch.isinf(sigma), torch.full_like(error, DENORMAL), error)  # finite by infinity: zero
    error = torch.where((x.error == 0) & (centred == 0) & (x.value == 0), torch.zeros_like(error), error)
    risky = ~(x.value.square().sum(-1, keepdim=True) < OVERFLOW) & torch.isfinite(sigma)
    risky = risky | x.unchecked.any(-1, keepdim=True)
    result = Estimate(normed, error, x.nan_allowed, risky.expand_as(normed)).with_value(normed, error)
    if weight is not None:
        result = multiply(result, weight.double())
    return add_bias(result, bias)


# ---- Attention -----------------------------------------------------------------------------------------------------

EXP_RELATIVE = 2e-6  # allowed approximation error of an exponential
EXP_FLUSHED = 2.0**-125  # exponentials below this may be zero
EXP_RANGE = 100.0  # scores this far below the largest count nothing in fp32


def softmax(rows: Tensor) -> Estimate:
    """Of each row; of the exponents the rounding of a difference, of the sum that of its terms."""
    columns = rows.shape[-1]
    nothing = torch.zeros_like(rows, dtype=torch.bool)
    if rows.numel() == 0:
        return Estimate(rows, torch.zeros_like(rows), nothing, nothing)
    distance = (rows.amax(-1, keepdim=True) - rows).clamp(max=EXP_RANGE)
    value = torch.softmax(rows, -1)
    relative = 2 * (EXP_RELATIVE + U32 * distance) + (columns + 8) * U32
    error = finite(value * relative) + EXP_FLUSHED
    return Estimate(value, torch.where(torch.isfinite(value), error, 0.0), nothing, nothing)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scale: float,
    weight_rounding: float = 0.0,
    sinks: Tensor | None = None,
) -> Estimate:
    """All [batch, heads, rows, columns] in float64, the same number of heads; the result is [batch, rows, heads, ...].

    `weight_rounding`: the relative error of probabilities that are stored before they are multiplied by the values.
    `sinks`: a column more of scores, of a key whose value is nothing.
    """
    keys, depth = key.shape[2], key.shape[3]
    if keys == 0:
        nothing = (query @ key.mT @ value).transpose(1, 2)
        false = torch.zeros_like(nothing, dtype=torch.bool)
        return Estimate(nothing, torch.zeros_like(nothing), false, false)
    scale = single(scale)
    product = query @ key.mT * scale
    scores = product + bias
    error = (depth + 6) * U32 * (query.abs() @ key.abs().mT * abs(scale))
    error = error + 2 * U32 * (product.abs() + finite(bias).abs() + EXP_RANGE) + depth * SMALLEST_NORMAL
    if sinks is not None:
        sinks = sinks.expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
        error = torch.cat([error, 2 * U32 * (finite(sinks).abs() + EXP_RANGE)], -1)
        value = torch.cat([value, torch.zeros_like(value[:, :, :1])], 2)
    largest = scores.amax(-1, keepdim=True)
    matters = scores > largest - EXP_RANGE
    worst = torch.where(matters, error, 0.0).amax(-1, keepdim=True)
    weights = torch.exp(scores - largest).nan_to_num(0.0)  # of a row that sees nothing: -inf minus -inf
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total > 0, weights / total, 0.0)
    steps = keys // 32 + 2  # of the online softmax, each with a factor
    relative = 2 * (torch.expm1(2 * worst) + steps * EXP_RELATIVE) + 2 * (keys + 8) * U32 + weight_rounding
    out = weights @ value
    bound = (weights @ value.abs()) * relative + EXP_FLUSHED * value.abs().sum(2, keepdim=True)
    bound = torch.where(total > 0, bound, 0.0) + U32 * out.abs() + DENORMAL
    unchecked = (relative > 0.5).expand_as(out)
    value, bound, unchecked = (x.transpose(1, 2) for x in (out, bound, unchecked))
    return Estimate(value, bound, torch.zeros_like(unchecked), unchecked)


# ---- Comparison ----------------------------------------------------------------------------------------------------


def rounded(x: Tensor, dtype: torch.dtype, scale: float, zero_point: int) -> Tensor:
    """float64 -> what is stored in `dtype`, as float64. Monotone."""
    if dtype in INTEGER_RANGE:
        low, high = INTEGER_RANGE[dtype]
        return (x.round() + zero_point).clamp(low, high)
    return x.to(torch.float32).to(dtype).to(torch.float64)


def acceptable(
    got: Tensor, expected: Estimate, flushes: bool = False, scale: float = 1.0, zero_point: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each element of `got` is right, and the lowest and highest value that would be."""
    value, error = expected.value, expected.error
    if got.dtype in INTEGER_RANGE:
        scale = single(scale)
        value, error = value / scale, error / scale
        if math.frexp(scale)[0] != 0.5:  # value / scale, or value * (1 / scale): two roundings at most
            error = torch.where(torch.isfinite(value), error + 2 * U32 * value.abs() * (1 + 4 * U32), error)
    elif got.dtype == torch.bfloat16 and flushes:
        # The conversion does so too, with whatever the kernel rightly has before it.
        error = torch.where(value.abs() - error < 2 * SMALLEST_NORMAL, error + SMALLEST_NORMAL, error)
    low = rounded(value - error, got.dtype, scale, zero_point)
    high = rounded(value + error, got.dtype, scale, zero_point)
    actual = got.to(torch.float64)
    right = (actual >= low) & (actual <= high)
    right |= expected.unchecked
    right |= (torch.isnan(value) | expected.nan_allowed) & torch.isnan(actual)
    if got.dtype in INTEGER_RANGE:  # an integer has no NaN: anything will do
        right |= torch.isnan(value) | expected.nan_allowed
    return right, low, high
