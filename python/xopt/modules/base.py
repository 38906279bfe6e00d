"""What all replacements have in common: they change a module in place, by giving it a class derived of its own.

The module object stays: its name, hooks, attributes and parameters of the same names are kept, and `isinstance` with
its source class holds. `Replacement.adopt` derives that class, once for each pair of source class and replacement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from xopt import sycl
from xopt.config import Config
from xopt.graph.autocast import autocast_dtype
from xopt.modules.packed_parameter import PackedParameter
from xopt.ops.fakes import FLOATING


@dataclass
class Context:
    """What one call of `optimize` knows while it goes through a model."""

    dtype: torch.dtype | None
    """The dtype that weights shall have; None: the one they have."""
    config: Config = field(default_factory=Config)
    replaced: dict[int, nn.Parameter] = field(default_factory=dict)
    """By the id of a source parameter, what took its place: where two modules share one, they go on sharing."""
    shared: set[int] = field(default_factory=set)
    """Ids of parameters that some other module reads in its plain layout."""
    packed: set[int] = field(default_factory=set)
    """Ids of parameters that a linear layer packs, and that embeddings then read out of that."""

    def target(self, weight: torch.Tensor) -> torch.dtype:
        return self.dtype or weight.dtype

    def pack(self, weight: nn.Parameter, transposed: bool = False, split: int = 0) -> PackedParameter:
        """The packed parameter, one for all who share this one."""
        packed = self.replaced.get(id(weight))
        if not isinstance(packed, PackedParameter):
            packed = self.replaced[id(weight)] = PackedParameter.pack(
                weight, self.target(weight), transposed=transposed, split=split
            )
        return packed


class Replacement:
    """A mixin that stands before the source class in the derived one. `optimize` tries its direct subclasses."""

    source: ClassVar[type[nn.Module]]
    """Its instances and those of its subclasses are candidates."""
    switch: ClassVar[str]
    """The name in `Config` that turns it off."""
    packs: ClassVar[bool] = False
    """Whether it packs its weight."""
    keeps_weight: ClassVar[bool] = False
    """Whether the source's weight stays a parameter, as it is, beside what is packed."""
    reads_packed: ClassVar[bool] = False
    """Whether it can use a weight that another module has packed."""
    on_cpu_only: ClassVar[bool] = False
    """Whether it has kernels for the CPU alone."""
    comes_last: ClassVar[bool] = False
    """Whether it is for modules that nothing else takes."""

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        return isinstance(module, cls.source)

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        """Why this module has to stay as it is, in words for the report; None: it can be replaced."""
        raise NotImplementedError

    @classmethod
    def packed_names(cls, module: Any) -> tuple[str, ...]:
        """Those of the source's parameters that others take the place of."""
        return () if cls.keeps_weight else ("weight",)

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        """Changes the module in place; what was done, in words for the report."""
        raise NotImplementedError


_derived: dict[tuple[type, type, type | None], type] = {}


def derive(replacement: type, source: type, *, below: bool = False, before: type | None = None) -> type:
    """The class of a module that was replaced. `below`: a forward that the source class has of its own comes first, and
    finds the replacement's where it goes on to its base class's. `before`: a class that comes before both."""
    key = replacement, source, before
    if key not in _derived:
        attributes = {
            "__module__": source.__module__,
            "__qualname__": source.__qualname__,
            "__doc__": source.__doc__,
            "__reduce_ex__": lambda self, protocol: (_restore, (replacement, source, below, before), _state(self)),
        }
        attributes |= getattr(replacement, "_xopt_attributes", lambda source: {})(source)
        bases = (source, replacement) if below else (replacement, source)
        _derived[key] = type(source.__name__, bases if before is None else (before, *bases), attributes)
    return _derived[key]


def _state(module: nn.Module) -> Any:
    """What pickle keeps of a module: what its class says, where that says anything (nn.LSTM leaves out references)."""
    own_state = getattr(type(module), "__getstate__", None)
    return module.__dict__ if own_state in (None, getattr(object, "__getstate__", None)) else own_state(module)


def _restore(replacement: type, source: type, below: bool, before: type | None = None) -> nn.Module:
    """An empty instance, for pickle and deepcopy: a derived class cannot be found by its name."""
    derived: Any = derive(replacement, source, below=below, before=before)
    module: nn.Module = derived.__new__(derived)
    return module


def own_forward(module: nn.Module, source: type[nn.Module]) -> bool:
    """Whether the module computes something else than `source` does."""
    return type(module).forward is not source.forward or "forward" in module.__dict__


def forward_problem(module: nn.Module, source: type[nn.Module]) -> str | None:
    """Why a module's forward cannot be that of its replacement, or lead to it: one of its own may do so by
    `super().forward` (a convolution that pads first), as long as it does not read the weight itself."""
    if not own_forward(module, source):
        return None
    code = getattr(type(module).forward, "__code__", None)
    names = () if code is None else code.co_names
    if "forward" not in module.__dict__ and {"super", "forward"} <= set(names) and "weight" not in names:
        return None
    return "it has a forward of its own"


def dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def result_dtype(input: torch.Tensor) -> torch.dtype:
    """Autocast's dtype under autocast, else the input's."""
    return autocast_dtype(input.device) or input.dtype


def has_kernels(device: torch.device) -> bool:
    """Whether there are kernels of ours for a device; whether this build has them, it says itself."""
    return device.type in ("cpu", "xpu")


def takes_halves(module: nn.Module) -> bool:
    """Whether torch can give it bf16 and fp16: not where it is quantized, or computes with sparse weights."""
    return not is_quantized(module) and all(
        parameter is None or parameter.layout == torch.strided for parameter in module._parameters.values()
    )


def is_quantized(module: nn.Module) -> bool:
    """Whether it is one of torch's quantized layers, which hold no parameters."""
    folders = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
    return any(kind.__module__.startswith(folders) for kind in type(module).__mro__)


def plain_parameter_problem(module: nn.Module, name: str) -> str | None:
    """Why a module's parameter cannot be taken over as it stands."""
    if nn.utils.parametrize.is_parametrized(module):
        return "its weight is computed by a parametrization"
    parameter = module._parameters.get(name)
    if parameter is None:
        return f"its {name} is no parameter of its own (weight_norm and the like compute it in every call)"
    if isinstance(parameter, nn.UninitializedParameter):
        return "its parameters are not initialized yet"
    if type(parameter) is not nn.Parameter:
        return f"its {name} is a {type(parameter).__name__}"
    if not has_kernels(parameter.device):
        return f"its {name} is on device {parameter.device}"
    if parameter.device.type == "xpu" and not sycl.available():
        return f"its {name} is on device {parameter.device}, which takes the SYCL part"
    if parameter.layout != torch.strided:
        return f"its {name} has layout {parameter.layout}"
    if parameter.dtype not in FLOATING:
        return f"its {name} has dtype {parameter.dtype}"
    return None


def cast_parameter(parameter: torch.Tensor, context: Context) -> nn.Parameter:
    """The parameter in the target dtype, still in its plain layout; the same one for all that share it."""
    if id(parameter) not in context.replaced:
        with torch.no_grad():
            # A copy even where the dtype stays: the source model may still hold this one.
            values = parameter.detach().to(context.target(parameter), copy=True)
        context.replaced[id(parameter)] = nn.Parameter(values, requires_grad=False)
    return context.replaced[id(parameter)]
