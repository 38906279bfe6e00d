"""Modules that are no nn.Linear, and compute what it does in the calls that they get: a layer that a library writes for
itself, with modes that are switched off and results beside the product (I-BERT's QuantLinear, where it does not
quantize).

Such a module is known by its weight [out_features, in_features] and by the record of its forward. Its own forward
stays, for all calls but those that were recorded: of one tensor, with defaults for the rest, while all that the forward
reads of the module is what it was.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node

from xopt.graph.record import active
from xopt.graph.symbol import Symbol
from xopt.modules.base import Context, Replacement
from xopt.modules.linear import PackedProduct
from xopt.modules.packed_state import PackedState
from xopt.modules.plain_forward import is_product, is_still, read_of, results_of_rows
from xopt.modules.product import product_problem

_FORM = "_xopt_form"  # in a module's __dict__


@dataclass(frozen=True)
class Form:
    """What a forward does around its product."""

    result: tuple[Any, ...] | None
    """What it returns, with the product at `place`; None: the product alone."""
    place: int
    watched: tuple[tuple[str, Any], ...]
    """What it reads of the module beside weight and bias, and what that was."""
    defaults: tuple[tuple[str, Any], ...]
    """Its other arguments, which a call has to leave as they are."""

    def takes(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the forward does so in this call."""
        usual = dict(self.defaults)
        given = [*zip(usual, args[1:], strict=False), *kwargs.items()]
        plain = 1 <= len(args) <= len(usual) + 1 and isinstance(args[0], torch.Tensor | Symbol)
        as_usual = all(name in usual and value is usual[name] for name, value in given)
        return plain and as_usual and all(is_still(module, *each) for each in self.watched)

    def around(self, product: Any) -> Any:
        return product if self.result is None else (*self.result[: self.place], product, *self.result[self.place + 1 :])


class PackedLookAlike(Replacement, PackedProduct):
    source: ClassVar[type[nn.Module]] = nn.Module
    switch: ClassVar[str] = "weights_prepack"
    packs: ClassVar[bool] = True

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        if isinstance(module, nn.Linear) or type(module).__module__.startswith("torch."):
            return False
        parameters, held = module._parameters, module.__dict__
        weight = parameters.get("weight")
        sizes = (held.get("out_features"), held.get("in_features"))
        fits = not module._modules and weight is not None and weight.shape == sizes
        return fits and {*parameters} <= {"weight", "bias"} and ("bias" in parameters or held.get("bias", 0) is None)

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        problem = product_problem(module)
        if problem is None and _form_of(module) is None:
            return "its forward is not that of a linear layer"
        return problem

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        module.__dict__[_FORM] = _form_of(module)
        module._parameters.setdefault("bias", module.__dict__.pop("bias", None))
        return cls.pack(module, context)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        form: Form = self.__dict__[_FORM]
        if not torch.compiler.is_compiling() and active.recorder is not None:
            for name, _ in form.watched:
                active.recorder.watch(self, name)
        if form.takes(self, args, kwargs):
            return form.around(self.product(args[0]))
        return super(PackedState, self).forward(*args, **kwargs)  # the source's own


def _form_of(module: Any) -> Form | None:
    """None: it does not compute what nn.Linear does, or nobody can tell when."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or "forward" in module.__dict__:
        return None
    watched, defaults = read_of(module, forward.__code__), _defaults(forward)
    if watched is None or defaults is None:
        return None
    around = (_around_product(result, module.bias is not None) for result in results_of_rows(module))
    first = next(around)
    if first is None or any(other != first for other in around):
        return None
    return Form(*first, tuple(watched), tuple(defaults))


def _around_product(recorded: Any, with_bias: bool) -> tuple[tuple[Any, ...] | None, int] | None:
    """What a recorded forward returns beside its product, and where that stands; None: it has none."""
    result = recorded if type(recorded) is tuple else (recorded,)
    places = [place for place, value in enumerate(result) if isinstance(value, Node)]
    if len(places) != 1 or not is_product(result[places[0]], with_bias):
        return None
    (place,) = places
    return ((*result[:place], None, *result[place + 1 :]) if type(recorded) is tuple else None), place


def _defaults(forward: FunctionType) -> list[tuple[str, Any]] | None:
    """Of all arguments after the first; None: there are some without."""
    parameters = list(inspect.signature(forward).parameters.values())[2:]
    if any(each.kind is not each.POSITIONAL_OR_KEYWORD or each.default is each.empty for each in parameters):
        return None
    return [(each.name, each.default) for each in parameters]
