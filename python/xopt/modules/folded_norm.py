"""A BatchNorm after a convolution or a linear layer, as a factor and an addend for each channel, in fp32.

The packed weight stays as it is: the factor is applied to the sums before they are rounded, which is more exact than a
scaled weight in bf16, and leaves every parameter where the source model has it. The two vectors are computed when they
are first needed, and again after any of the tensors they came from has changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from xopt.modules.pattern import argument, dtype_of
from xopt.modules.remembered import remembered
from xopt.ops.fakes import FLOATING

_ARGUMENTS = ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias"))
_FOLDED = "_xopt_folded"


def folded(
    module: nn.Module, own_bias: Tensor | None, norm: tuple[Tensor | None, ...], eps: float
) -> tuple[Tensor, Tensor]:
    """Factor and addend for the sums of a layer, whose own bias is in the addend."""

    def make() -> tuple[Tensor, Tensor]:
        mean, variance, weight, bias, own = (None if each is None else each.double() for each in (*norm, own_bias))
        assert mean is not None, "a BatchNorm without statistics was folded"
        assert variance is not None, "a BatchNorm without statistics was folded"
        scale = torch.rsqrt(variance + eps) if weight is None else weight * torch.rsqrt(variance + eps)
        shift = -mean * scale if own is None else (own - mean) * scale
        return scale.float(), (shift if bias is None else shift + bias).float()

    return remembered(module, _FOLDED, (*norm, own_bias, eps), make)


def norm_of(node: Node) -> dict[str, Any] | None:
    """What a step that calls F.batch_norm does, if it does the same in all calls."""
    norm = tuple(argument(node, place, name) for place, name in _ARGUMENTS)
    if argument(node, 5, "training", False) is not False or norm[0] is None or not all(map(_is_constant, norm)):
        return None
    return {"norm": norm, "eps": argument(node, 7, "eps", 1e-5)}


def _is_constant(node: Any) -> bool:
    return node is None or (isinstance(node, Node) and node.op == "get_attr" and dtype_of(node) in FLOATING)
