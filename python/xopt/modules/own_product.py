"""Modules that hold a matrix as a parameter of their own and multiply by it themselves (`x @ self.projection`,
`functional.linear(x, self.weight[expert])`): such parameters are packed as a layer's weight is.

Which these are, the text of the module's methods says (`own_product_text.py`), before anything has been called. Their
forward stays, and finds the packed weight where the parameter was: recorded as any block's, its products are done by
the steps of `product_by_weight.py`, and what else may be done with the parameter gets its unpacked values.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from xopt.modules.base import Context, Replacement, cast_parameter, derive, dtype_name, plain_parameter_problem
from xopt.modules.block import PROGRAMS, Programs, TensorBlock
from xopt.modules.own_product_text import Use, uses_of
from xopt.modules.packed_state import PackedState
from xopt.ops.fakes import FLOATING

_LEAST = 16  # rows and columns of a matrix that is worth it
# Values of a matrix where a product for each of a stack takes less time than packing all in one call (`matmul.py`).
_LEAST_AT_ONCE = 1 << 17


class OwnProducts(PackedState, TensorBlock):
    """What such a module becomes: a block, whose parameters and modules may have any names."""


class PackOwnProducts(Replacement):
    source: ClassVar[type[nn.Module]] = nn.Module
    switch: ClassVar[str] = "weights_prepack"
    packs: ClassVar[bool] = True
    comes_last: ClassVar[bool] = True

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        if type(module).__module__.startswith("torch.") or "forward" in module.__dict__:
            return False
        return any(map(_may_be_matrix, module._parameters.values())) and bool(_matrices(module))

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        for name in _matrices(module):
            problem, parameter = plain_parameter_problem(module, name), module._parameters[name]
            if problem is not None:
                return problem
            if not context.config.autocast and context.target(parameter) != parameter.dtype:
                return "its forward multiplies by its own parameters, in their dtype (Config(autocast=False))"
        return None

    @classmethod
    def packed_names(cls, module: Any) -> tuple[str, ...]:
        return tuple(_matrices(module))

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        packed = []
        for name, use in _matrices(module).items():
            parameter = module._parameters[name]
            if id(parameter) in context.shared:
                module._parameters[name] = cast_parameter(parameter, context)
                continue
            module._parameters[name] = weight = context.pack(parameter, use.turned, use.split)
            packed.append(name)
        module.__class__ = derive(OwnProducts, type(module))
        module.__dict__[PROGRAMS] = Programs(context.config)
        if not packed:
            return "cast, not packed: what it multiplies by is shared with modules that read it in the plain layout"
        return f"packed as {dtype_name(weight.dtype)}: {', '.join(packed)}"


def _may_be_matrix(parameter: nn.Parameter | None) -> bool:
    if type(parameter) is not nn.Parameter or parameter.ndim not in (2, 3) or parameter.dtype not in FLOATING:
        return False
    return min(parameter.shape[-2:]) >= _LEAST or (parameter.ndim == 3 and parameter.shape[0] >= _LEAST)


def _matrices(module: nn.Module) -> dict[str, Use]:
    """By name, the parameters that are multiplied by, and how."""
    found = {}
    for name, use in uses_of(type(module)).items():  # type: ignore[arg-type]
        parameter = module._parameters.get(name)
        if parameter is None or not _may_be_matrix(parameter) or not use.fits(parameter.shape):
            continue
        if not use.at_once or parameter[0].numel() >= _LEAST_AT_ONCE:
            found[name] = use
    return found
