"""A BatchNorm or a layer scale, or the two, after a convolution or a linear layer, as a factor and an addend for each
channel. In a graph they are one tuple: a BatchNorm's running mean, variance, weight and bias, with a layer scale behind
them if there is one; and of a layer scale alone (None, None, itself, None).

Both are vectors of fp32. The packed weight stays as it is: the factor is applied to the sums before they are rounded,
which is more exact than a scaled weight in bf16, and leaves every parameter where the source model has it. They are
computed when they are first needed, and again after any of the tensors they came from has changed.

A factor and an addend of one value each behind the activation (`scaled_activation.py`) are a part of both, and of the
activation's bounds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from xopt.modules.chain import Seen, Stored
from xopt.modules.counted_parameter import asking_quickly, count_changes
from xopt.modules.pattern import argument, is_stored
from xopt.ops.chain import Given, Part

_ARGUMENTS = ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias"))
_FOLDED = "_xopt_folded"


class _Folded:
    def __init__(self, sources: tuple[Tensor | None, ...], eps: float, affine: tuple[Tensor | None, ...]) -> None:
        self._sources = (*sources, *affine)
        count_changes(*self._sources)
        self._versions = _versions(self._sources)
        self._eps = eps
        mean, variance, weight, bias, *factors, own_bias = (
            None if each is None else each.double().flatten() for each in sources
        )
        scale = weight
        if variance is not None:
            scale = torch.rsqrt(variance + eps) if weight is None else weight * torch.rsqrt(variance + eps)
        assert scale is not None, "there is nothing to fold"
        if mean is not None:
            own_bias = -mean if own_bias is None else own_bias - mean
        shift = bias if own_bias is None else own_bias * scale
        if own_bias is not None and bias is not None:
            shift = own_bias * scale + bias
        for factor in factors:
            scale = scale if factor is None else scale * factor
            shift = shift if factor is None or shift is None else shift * factor
        self._factor, self._addend = (float(each) for each in affine if each is not None) if affine else (1.0, 0.0)
        if affine:
            assert shift is not None, "only a norm has something behind its activation"
            scale, shift = scale * self._factor, shift * self._factor + self._addend
        self.scale = scale.float()
        self.shift = None if shift is None else shift.float()

    def bounds(self, low: float, high: float) -> tuple[float, float]:
        """Those of an activation, with what follows it."""
        if self._factor == 0.0:
            return self._addend, self._addend
        moved = low * self._factor + self._addend, high * self._factor + self._addend
        return moved if self._factor > 0 else moved[::-1]

    def holds(self, sources: tuple[Tensor | None, ...], eps: float) -> bool:
        if self._versions is None or self._eps != eps:
            return False
        with asking_quickly():
            for now, then, version in zip(sources, self._sources, self._versions, strict=True):  # before each product
                if now is not then or (now is not None and now._version != version):
                    return False
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied module computes its own."""

    def __reduce__(self) -> Any:
        return type(None), ()


def _versions(sources: tuple[Tensor | None, ...]) -> list[int] | None:
    """None: one of them is an inference tensor, whose changes nobody counts."""
    if any(each is not None and each.is_inference() for each in sources):
        return None
    return [0 if each is None else each._version for each in sources]


def forget_folded(module: nn.Module) -> None:
    """For a program that is made anew: the last one's guard may have seen what no version of a tensor tells."""
    module.__dict__.pop(_FOLDED, None)


def folded(
    module: nn.Module,
    own_bias: Tensor | None,
    norm: tuple[Tensor | None, ...] | None,
    eps: float,
    affine: tuple[Tensor | None, ...] = (),
) -> tuple[Tensor | None, Tensor | None]:
    """Factor and addend for the sums of a layer, whose own bias is in the addend, which is that bias without a norm.
    `affine`: a factor and an addend behind the activation, which then is `bounded`."""
    if norm is None:
        return None, own_bias
    sources = (*norm, own_bias)
    cached: _Folded | None = module.__dict__.get(_FOLDED)
    if cached is None or not cached.holds((*sources, *affine), eps):
        with torch.no_grad():
            cached = module.__dict__[_FOLDED] = _Folded(sources, eps, affine)
    return cached.scale, cached.shift


def bounded(module: nn.Module, after: dict[str, Any]) -> dict[str, Any]:
    """What follows the sums of a layer whose factor and addend behind the activation have just been folded."""
    is_clamp = after["activation"] == "clamp"
    low, high = module.__dict__[_FOLDED].bounds(*((after["alpha"], after["beta"]) if is_clamp else (0.0, math.inf)))
    return after | {"activation": "clamp", "alpha": low, "beta": high}


def fold_seen(
    seen: Seen,
    module: nn.Module,
    norm: tuple[Stored | None, ...] | None,
    eps: float,
    affine: tuple[Stored, ...] = (),
) -> tuple[Given | Part | None, Given | Part | None]:
    """As `folded`, for a chain's call: the operands."""
    if norm is None:
        return None, seen.parameter(module, "bias")
    sources = tuple(seen.stored(each) for each in norm)
    behind = tuple(seen.stored(each) for each in affine)
    scale, shift = folded(module, seen.tensor(module, "bias"), sources, eps, behind)
    return seen.own(scale), seen.own(shift)


def of_images(norm: tuple[Tensor | None, ...] | None, dims: int) -> tuple[Tensor | None, ...] | None:
    """For torch, with a layer scale that is multiplied with images as it is."""
    if norm is None:
        return None
    place = 2 if norm[0] is None else 4
    return tuple(
        each.reshape(-1, *(1,) * dims) if at == place and each is not None else each for at, each in enumerate(norm)
    )


def norm_of(node: Node) -> dict[str, Any] | None:
    """What a step that calls F.batch_norm does, if it does the same in all calls."""
    norm = tuple(argument(node, place, name) for place, name in _ARGUMENTS)
    if argument(node, 5, "training", False) is not False or norm[0] is None or not all(map(_is_constant, norm)):
        return None
    return {"norm": norm, "eps": argument(node, 7, "eps", 1e-5)}


def _is_constant(node: Any) -> bool:
    return node is None or is_stored(node)
