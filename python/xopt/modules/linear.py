"""nn.Linear with a packed weight, on `torch.ops.xopt.linear`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.symbol import Symbol, recorder_of
from xopt.modules.activation import ACTIVATIONS
from xopt.modules.base import (
    Context,
    Replacement,
    cast_parameter,
    derive,
    own_forward,
    plain_parameter_problem,
    result_dtype,
)
from xopt.modules.folded_norm import folded
from xopt.modules.packed_parameter import PackedParameter, Place
from xopt.modules.packed_state import FLOATING, PackedState
from xopt.modules.pattern import step

_linear = torch.ops.xopt.linear.default


def place_of(weight: Any) -> Place | None:
    """Where `torch.ops.xopt.linear` finds a weight; None: it is not packed, or not for that operator."""
    if type(weight) is not PackedParameter:
        return None
    place = weight.place
    return place if place.in_pair is None and place.groups is None and place.gates is None else None


class PackedProduct(PackedState):
    """Computes with its packed weight wherever it can: on CPU tensors that want no gradient. A weight that somebody
    put in the packed one's place (functional_call, an assignment) is used as torch would use it."""

    out_features: int
    weight: Any
    bias: Any
    transposed: ClassVar[bool] = False
    """Whether the logical weight is [in, out]."""

    @classmethod
    def pack(cls, module: Any, context: Context) -> str:
        """Changes a module of the source class in place; what was done, in words for the report."""
        weight = module.weight
        module.__class__ = derive(cls, type(module))
        if id(weight) in context.shared:
            module._parameters["weight"] = cast_parameter(weight, context)
            return "cast, not packed: its weight is shared with a module that reads it in the plain layout"
        module._parameters["weight"] = packed = context.pack(weight, cls.transposed)
        return f"packed as {str(packed.dtype).removeprefix('torch.')}"

    def forward(self, input: Any) -> torch.Tensor:
        if type(input) is Symbol:
            symbol: Any = input
            return recorder_of(symbol).call_module(self, linear, symbol, out_dtype=result_dtype(symbol))  # type: ignore[no-any-return]
        place, bias = place_of(self._parameters["weight"]), self._parameters["bias"]
        wants_gradient = torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad))
        if place is None or wants_gradient or input.dtype not in FLOATING:
            return self.plain_forward(input)
        return _linear(  # type: ignore[no-any-return]
            input,
            place.packed,
            self.out_features,
            bias,
            out_dtype=result_dtype(input),
            first_column=place.first_column,
        )

    def plain_forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if isinstance(weight, PackedParameter):
            weight = weight.unpack()
        if input.dtype in FLOATING and not torch.is_autocast_enabled("cpu"):
            weight = weight.to(input.dtype)
            bias = None if bias is None else bias.to(input.dtype)
        return functional.linear(input, weight.t() if self.transposed else weight, bias)


class PackedLinear(Replacement, PackedProduct, nn.Linear):
    source: ClassVar[type[nn.Module]] = nn.Linear
    switch: ClassVar[str] = "weights_prepack"
    packs: ClassVar[bool] = True
    reads_packed: ClassVar[bool] = True

    @classmethod
    def why_not(cls, module: nn.Linear, context: Context) -> str | None:
        if own_forward(module, nn.Linear):
            return "it has a forward of its own"
        return product_problem(module)

    @classmethod
    def replace(cls, module: nn.Linear, context: Context) -> str:
        return cls.pack(module, context)


def product_problem(module: Any) -> str | None:
    """Why the weight or bias of such a module cannot be taken over."""
    problem = plain_parameter_problem(module, "weight")
    if problem is None and module.bias is not None and module.bias.dtype not in FLOATING:
        return f"its bias has dtype {module.bias.dtype}"
    return problem


def _label(kwargs: dict[str, Any]) -> str:
    norm = ["batch_norm"] if kwargs.get("norm") else []
    fused = norm + fused_names(kwargs)
    return "+".join(["linear", *fused]) if fused else ""


def fused_names(kwargs: dict[str, Any]) -> list[str]:
    """What a step does to its sums, in order."""
    after = [kwargs.get("activation", "none"), kwargs.get("binary", "none")]
    if kwargs.get("activation_last"):
        after.reverse()
    return [name for name in after if name != "none"]


def is_output_like(other: torch.Tensor, input: torch.Tensor, module: PackedProduct) -> bool:
    """Whether a tensor has the shape of a product, which it had when the graph was recorded."""
    return other.shape[:-1] == input.shape[:-1] and other.shape[-1] == module.out_features


def finished(
    result: torch.Tensor,
    activation: str,
    alpha: float,
    beta: float,
    binary: str,
    other: torch.Tensor | None,
    activation_last: bool,
) -> torch.Tensor:
    """What follows a product, by torch."""
    if activation_last and other is not None:
        return ACTIVATIONS[activation](BINARY[binary](result, other), alpha, beta)
    result = ACTIVATIONS[activation](result, alpha, beta)
    return result if other is None else BINARY[binary](result, other)


@step(_label)
def linear(
    module: PackedProduct,
    input: torch.Tensor,
    *,
    norm: tuple[torch.Tensor | None, ...] | None = None,
    eps: float = 0.0,
    activation: str = "none",
    alpha: float = 0.0,
    beta: float = 0.0,
    binary: str = "none",
    other: torch.Tensor | None = None,
    activation_last: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The step of a recorded graph that calls the module; patterns hand it what follows: a BatchNorm's running mean,
    variance, weight and bias, then what a product may end in."""
    place = place_of(module._parameters["weight"])
    bias: torch.Tensor | None = module._parameters["bias"]
    if place is None or (other is not None and not is_output_like(other, input, module)):
        result = module(input)
        if norm is not None:
            mean, variance, weight, shift = norm
            result = functional.batch_norm(result, mean, variance, weight, shift, eps=eps)
        result = finished(result, activation, alpha, beta, binary, other, activation_last)
        return result if out_dtype is None else result.to(out_dtype)
    scale = None
    if norm is not None:
        scale, bias = folded(module, bias, norm, eps)
    return _linear(  # type: ignore[no-any-return]
        input,
        place.packed,
        module.out_features,
        bias,
        activation=activation,
        alpha=alpha,
        beta=beta,
        binary=binary,
        other=other,
        activation_last=activation_last,
        out_dtype=result_dtype(input) if out_dtype is None else out_dtype,
        first_column=place.first_column,
        scale=scale,
    )


BINARY: dict[str, Any] = {"add": torch.add, "mul": torch.mul}
