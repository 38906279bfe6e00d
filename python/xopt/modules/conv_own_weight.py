"""Convolutions whose own forward computes the weight that it multiplies with out of theirs (BiT standardizes it).

That forward stays, and does whatever else it does (padding); where it comes to torch's convolution with a weight that
is computed as the packed one was, the packed one is used instead. What it has computed from parameters alone by then is
left out of recorded programs. Any other convolution of its is torch's: what a call's arguments or sizes make of the
weight, or of the stride.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch.fx import Node

from xopt.graph.autocast import autocast_dtype
from xopt.graph.record import active
from xopt.graph.symbol import Symbol
from xopt.modules.base import Context, Replacement, derive, own_forward
from xopt.modules.computed_weight import COMPUTED, ComputedWeight, Held, compute_weight, held_by, pack_computed
from xopt.modules.conv import PackedConv, kind_of, packed_weight
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import argument, is_call
from xopt.modules.plain_forward import read_of, recorded_result
from xopt.modules.product import is_for_torch, product_problem
from xopt.modules.weight_formula import Formula, Trace, formula_of_node

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_GEOMETRY = (("stride", 3, 1), ("padding", 4, 0), ("dilation", 5, 1))
_READ = "_xopt_read"  # in a module's __dict__: names of what its forward reads of it


class _Call(NamedTuple):
    """Of one of torch's convolutions, as `argument` takes it; so does it a recorded one."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _OwnWeight(ComputedWeight):
    formula: Formula | None = None
    """Of the weight that is packed."""
    _recorded: tuple[list[Any], Formula | None] | None = None

    def made_from(self, module: Any) -> Iterator[Held]:
        return (each for each in held_by(module) if each[1] != "bias")

    def also(self, module: Any) -> list[Any]:
        return [getattr(module, name) for name in module.__dict__[_READ]]

    def compute(self, module: Any) -> torch.Tensor | None:
        weight, self.formula = _own_weight(module, lambda input: own_forward_of(module, input))
        return weight

    def recorded_formula(self, module: Any) -> Formula | None:
        """As a recording has it."""
        state = self.also(module)
        if self._recorded is None or self._recorded[0] != state:
            self._recorded = state, _recorded_formula(module, type(module).__bases__[-1])
        return self._recorded[1]


class _FirstCall(Trace):
    """Keeps what was multiplied with."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._module = module
        self.products: dict[int, tuple[torch.Tensor, torch.Tensor, Formula]] = {}

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # a recording that is going on has nothing to do with it
            result = function(*args, **kwargs)
        if function in _CONVOLUTIONS:
            call = _Call(args, kwargs)
            weight = argument(call, 1, "weight")
            formula = self.formula(weight)
            if formula is not None and _is_as_the_module_says(self._module, call, self.formula):
                self.products[id(result)] = result, weight, formula
        return result


class _PackedWeight(Trace):
    """Does a module's convolution in the place of torch's."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._module = module

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function not in _CONVOLUTIONS:
            return function(*args, **kwargs)
        call, module = _Call(args, kwargs), self._module
        input = argument(call, 0, "input")
        if type(input) is Symbol:
            is_packed, formula_of = packed_weight(module) is not None, self._formula_of_symbol
            usual = module.__dict__[COMPUTED].recorded_formula(module)
        else:
            is_packed, formula_of = not module.is_for_torch(input), self.formula
            usual = module.__dict__[COMPUTED].formula  # what is packed now
        weight = formula_of(argument(call, 1, "weight"))
        if is_packed and weight is not None and weight == usual and _is_as_the_module_says(module, call, formula_of):
            return module.product(input)
        return _in_one_dtype(function, call)

    def _formula_of_symbol(self, value: Any) -> Formula | None:
        if type(value) is not Symbol or active.recorder is None:
            return self.formula(value)
        held = (self._module._parameters | self._module._buffers).items()
        symbols = {name: active.recorder.symbol_of(tensor) for name, tensor in held if tensor is not None}
        names = {symbol._node.target: name for name, symbol in symbols.items() if type(symbol) is Symbol}
        return formula_of_node(value._node, names)


class OwnWeightConv(PackedConv, Replacement):
    keeps_weight: ClassVar[bool] = True

    @classmethod
    def is_candidate(cls, module: Any) -> bool:
        if kind_of(module) is None or not own_forward(module, kind_of(module)) or "forward" in module.__dict__:
            return False
        return product_problem(module) is None and _read(module) is not None and _multiplies_with_its_own(module)

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        return None

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        module.__dict__[_READ] = tuple(name for name, _ in _read(module) or ())
        module.__class__ = derive(cls, type(module))
        return pack_computed(module, context.dtype, _OwnWeight, groups=module.groups)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return own_forward_of(self, *args, **kwargs)
        if active.recorder is not None:
            for name in self.__dict__[_READ]:
                active.recorder.watch(self, name)
        with _PackedWeight(self):
            return own_forward_of(self, *args, **kwargs)

    def is_for_torch(self, input: torch.Tensor) -> bool:
        return packed_weight(self) is None or is_for_torch(input, self._parameters["bias"])

    def plain_forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = compute_weight(self), self._parameters["bias"]
        return self._conv_forward(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))


def own_forward_of(module: Any, *args: Any, **kwargs: Any) -> Any:
    """By the forward that the source class has."""
    return super(PackedState, module).forward(*args, **kwargs)


def _read(module: Any) -> list[tuple[str, Any]] | None:
    code = getattr(type(module).forward, "__code__", None)
    return None if code is None else read_of(module, code)


def _smallest_input(module: Any) -> tuple[int, ...]:
    """The size of the smallest image that the kernel fits into."""
    spans = zip(module.kernel_size, module.dilation, strict=True)
    return (1, module.in_channels, *(step * (size - 1) + 1 for size, step in spans))


def _multiplies_with_its_own(module: Any) -> bool:
    """Whether the forward ends in a convolution by the module's geometry, with a weight computed from its own."""
    if _recorded_formula(module, type(module)) is None:
        return False
    state = torch.get_rng_state()
    with torch.no_grad():
        weight, _ = _own_weight(module, lambda input: type(module).forward(module, input))
    is_random = not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    return weight is not None and not is_random


def _recorded_formula(module: Any, kind: type) -> Formula | None:
    """Of what the forward of this class ends in a convolution with."""
    result = recorded_result(module, _smallest_input(module), kind=kind)
    if not is_call(result, *_CONVOLUTIONS):
        return None
    names = {f":{name}": name for name in (*module._parameters, *module._buffers)}

    def formula_of(value: Any) -> Formula | None:
        return formula_of_node(value, names) if isinstance(value, Node) else None

    return formula_of(argument(result, 1, "weight")) if _is_as_the_module_says(module, result, formula_of) else None


def _own_weight(module: Any, forward: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor | None, Formula | None]:
    """What the forward ends in a convolution with; None: it does not."""
    smallest = module._parameters["weight"].new_zeros(_smallest_input(module))
    outer, active.recorder = active.recorder, None
    try:
        with torch.autocast(smallest.device.type, enabled=False), _FirstCall(module) as seen:
            result = forward(smallest)
    finally:
        active.recorder = outer
    _, weight, formula = seen.products.get(id(result), (None, None, None))
    return weight, formula


def _is_as_the_module_says(module: Any, call: Any, formula_of: Callable[[Any], Formula | None]) -> bool:
    """Whether a convolution has the module's bias and geometry."""
    bias, dims = argument(call, 2, "bias"), len(module.kernel_size)
    its_bias = bias is None if module.bias is None else formula_of(bias) == Formula("bias", ())
    asked = [argument(call, place, name, default) for name, place, default in _GEOMETRY]
    own = [getattr(module, name) for name, _, _ in _GEOMETRY]
    same = all(_for_each(each, dims) == _for_each(its, dims) for each, its in zip(asked, own, strict=True))
    return its_bias and same and argument(call, 6, "groups", 1) == module.groups and module.padding_mode == "zeros"


def _for_each(given: Any, dims: int) -> Any:
    """Of a geometry, what it is in each dimension; None: a call's sizes tell."""
    if type(given) is str:
        return given
    told = (given,) * dims if type(given) is int else tuple(given) if isinstance(given, (tuple, list)) else ()
    return (told * dims if len(told) == 1 else told) if all(type(each) is int for each in told) else None


def _in_one_dtype(function: Any, call: _Call) -> Any:
    """torch's convolution, of an input that has the dtype that the model was optimized to."""
    names = ("input", "weight", "bias")
    input, weight, bias = (argument(call, place, name) for place, name in enumerate(names))
    if weight.dtype == input.dtype or autocast_dtype(input.device) is not None:
        return function(*call.args, **call.kwargs)
    bias = None if bias is None else bias.to(input.dtype)
    rest = {name: value for name, value in call.kwargs.items() if name not in names}
    return function(input, weight.to(input.dtype), bias, *call.args[3:], **rest)
