"""Convolutions whose own forward computes the weight that it multiplies with out of theirs (BiT standardizes it).

That forward stays, and does whatever else it does (padding); where it comes to torch's convolution, the packed weight
is used instead. What it has computed from parameters alone by then is left out of recorded programs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from xopt.graph.record import active
from xopt.graph.symbol import Symbol
from xopt.modules.base import Context, Replacement, derive, own_forward
from xopt.modules.computed_weight import ComputedWeight, compute_weight, pack_computed
from xopt.modules.conv import PackedConv, kind_of, packed_weight
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import argument, is_call, is_of_weights
from xopt.modules.plain_forward import read_of, recorded_result
from xopt.modules.product import is_for_torch, product_problem

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_GEOMETRY = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
_NAMES = tuple(name for _, name, _ in _GEOMETRY)
_READ = "_xopt_read"  # in a module's __dict__: names of what its forward reads of it


class _OwnWeight(ComputedWeight):
    def made_from(self, module: Any) -> tuple[torch.Tensor, ...]:
        return (module._parameters["weight"],)

    def also(self, module: Any) -> list[Any]:
        return [getattr(module, name) for name in module.__dict__[_READ]]

    def compute(self, module: Any) -> torch.Tensor:
        """What the forward hands to torch's convolution, which is as far as it gets here."""
        weight = module._parameters["weight"]
        smallest = weight.new_zeros(_smallest_input(module))
        try:
            with torch.autocast(weight.device.type, enabled=False), _Caught():
                own_forward_of(module, smallest)
        except _CaughtWeight as caught:
            return caught.weight
        raise RuntimeError(f"xopt: a {type(module).__name__} no longer calls torch's convolution")


class _CaughtWeight(Exception):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight


class _Caught(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _CONVOLUTIONS:
            raise _CaughtWeight(args[1] if len(args) > 1 else kwargs["weight"])
        return function(*args, **(kwargs or {}))


class _PackedWeight(TorchFunctionMode):
    """Does a module's convolution in the place of torch's."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _CONVOLUTIONS:
            input, module = args[0] if args else kwargs["input"], self._module
            if type(input) is Symbol or not module.is_for_torch(input):
                return module.product(input)
        return function(*args, **kwargs)


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

    def forward(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return own_forward_of(self, *args)
        if active.recorder is not None:
            for name in self.__dict__[_READ]:
                active.recorder.watch(self, name)
        with _PackedWeight(self):
            return own_forward_of(self, *args)

    def is_for_torch(self, input: torch.Tensor) -> bool:
        return packed_weight(self) is None or is_for_torch(input, self._parameters["bias"])

    def plain_forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = compute_weight(self), self._parameters["bias"]
        return self._conv_forward(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))


def own_forward_of(module: Any, *args: Any) -> Any:
    """By the forward that the source class has."""
    return super(PackedState, module).forward(*args)


def _read(module: Any) -> list[tuple[str, Any]] | None:
    code = getattr(type(module).forward, "__code__", None)
    return None if code is None else read_of(module, code)


def _smallest_input(module: Any) -> tuple[int, ...]:
    """The size of the smallest image that the kernel fits into."""
    spans = zip(module.kernel_size, module.dilation, strict=True)
    return (1, module.in_channels, *(step * (size - 1) + 1 for size, step in spans))


def _multiplies_with_its_own(module: Any) -> bool:
    """Whether the forward ends in a convolution by the module's geometry, with a weight computed from its own."""
    result = recorded_result(module, *_smallest_input(module)[1:])
    if not is_call(result, *_CONVOLUTIONS) or module.padding_mode != "zeros":
        return False
    weight, bias = argument(result, 1, "weight"), argument(result, 2, "bias")
    if not isinstance(weight, Node) or not is_of_weights(weight) or _sources(weight) != {":weight"}:
        return False
    its_bias = bias is None if module.bias is None else isinstance(bias, Node) and bias.target == ":bias"
    dims = len(module.kernel_size)
    asked = [argument(result, place, name, default) for place, name, default in _GEOMETRY]
    geometry = [(each,) * dims if isinstance(each, int) else each for each in asked]
    own = [each if isinstance(each, str) else tuple(each) for each in map(module.__getattribute__, _NAMES)]
    same = [each if isinstance(each, str) else tuple(each) for each in geometry] == own
    return its_bias and same and argument(result, 6, "groups", 1) == module.groups


def _sources(node: Node) -> set[Any]:
    """The parameters that something is computed from."""
    if node.op == "get_attr":
        return {node.target}
    return {source for each in node.all_input_nodes for source in _sources(each)}
