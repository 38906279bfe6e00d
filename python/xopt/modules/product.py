"""What a linear layer and a convolution have in common: a product with the module's weight, and what may follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from xopt.graph.autocast import autocast_dtype
from xopt.modules.activation import ACTIVATIONS
from xopt.modules.base import plain_parameter_problem, result_dtype
from xopt.modules.computed_weight import computed_problem, is_computed
from xopt.modules.gradients import wants_gradient
from xopt.modules.packed_parameter import PackedParameter
from xopt.ops.fakes import FLOATING

BINARY: dict[str, Any] = {"add": torch.add, "mul": torch.mul}


def product_problem(module: Any) -> str | None:
    """Why the weight or bias of such a module cannot be taken over."""
    problem = computed_problem(module) if is_computed(module) else plain_parameter_problem(module, "weight")
    if problem is None and module.bias is not None and module.bias.dtype not in FLOATING:
        return f"its bias has dtype {module.bias.dtype}"
    return problem


def is_for_torch(input: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether no kernel takes the call: it wants a gradient, or is of another dtype."""
    return input.dtype not in FLOATING or wants_gradient(input, bias)


def plain_parameters(module: Any, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias as torch's own function takes them with this input."""
    weight, bias = module.weight, module.bias
    if isinstance(weight, PackedParameter):
        weight = weight.unpack()
    if input.dtype in FLOATING and autocast_dtype(input.device) is None:
        weight = weight.to(input.dtype)
        bias = None if bias is None else bias.to(input.dtype)
    return weight, bias


def told(
    options: dict[str, Any],
    input: torch.Tensor,
    out_dtype: torch.dtype | None,
    *,
    scale: torch.Tensor | None = None,
    other: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The options of a product's operator with these among them, where they are not its defaults: to be told one
    costs torch 1.5 us, and a dtype 3, of the 10 that a small product takes."""
    if out_dtype is None:
        out_dtype = result_dtype(input)
    if out_dtype is not input.dtype:
        options["out_dtype"] = out_dtype
    if scale is not None:
        options["scale"] = scale
    if other is not None:
        options["other"] = other
    return options


def fused_arguments(after: dict[str, Any], other: Any) -> tuple[Any, ...]:
    """What operators take for what follows a product, in the order of their schemas."""
    activation, binary = after.get("activation", "none"), after.get("binary", "none")
    numbers = float(after.get("alpha", 0.0)), float(after.get("beta", 0.0))
    return (activation, *numbers, binary, other, after.get("activation_last", False))


def label(name: str) -> Callable[[dict[str, Any]], str]:
    """The name in the report of a step that computes `name`, with what is fused into it."""

    def with_fused(kwargs: dict[str, Any]) -> str:
        after = [kwargs.get("activation", "none"), kwargs.get("binary", "none")]
        if kwargs.get("activation_last"):
            after.reverse()
        norm = kwargs.get("norm")
        fused = [] if norm is None or norm[0] is None else ["batch_norm"]
        fused += [] if norm is None or (norm[0] is not None and len(norm) == 4) else ["layer_scale"]
        fused += [each for each in after[:1] if each != "none"] + ["affine"] * ("affine" in kwargs)
        fused += [each for each in after[1:] if each != "none"]
        return "+".join([name, *fused]) if fused else ""

    return with_fused


def finished(
    result: torch.Tensor,
    *,
    norm: tuple[torch.Tensor | None, ...] | None = None,
    eps: float = 0.0,
    activation: str = "none",
    alpha: float = 0.0,
    beta: float = 0.0,
    affine: tuple[torch.Tensor, ...] = (),
    binary: str = "none",
    other: torch.Tensor | None = None,
    activation_last: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What follows a product, by torch: a norm as `folded_norm.py` has it, then what a kernel's epilogue has."""
    if norm is not None:
        mean, variance, weight, bias, *factors = norm
        if mean is not None:
            result = functional.batch_norm(result, mean, variance, weight, bias, eps=eps)
        else:
            factors = [weight]
        for factor in factors:
            result = result if factor is None else result * factor
    if other is not None and activation_last:
        result = BINARY[binary](result, other)
    result = ACTIVATIONS[activation](result, alpha, beta)
    if affine:
        result = result * affine[0] + affine[1]
    if other is not None and not activation_last:
        result = BINARY[binary](result, other)
    return result if out_dtype is None else result.to(out_dtype)
