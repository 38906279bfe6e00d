"""A weight that torch computes in each call from other parameters, as `weight_norm` and `spectral_norm` have it, or a
forward from its own (`conv_own_weight.py`).

It is computed and packed once, and again when one of those parameters has changed. The parameters themselves stay as
they are, and so do the state dict and what `module.weight` gives. Where torch's older `torch.nn.utils.weight_norm` or
`spectral_norm` computes the weight by a hook before each call, the hook is kept apart: it would compute for nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from xopt.modules.base import dtype_name, has_kernels
from xopt.modules.chain import Seen
from xopt.modules.counted_parameter import count_changes
from xopt.modules.gradients import wants_gradient
from xopt.modules.packed_parameter import PackedParameter
from xopt.ops.chain import Given, Part
from xopt.ops.fakes import FLOATING

COMPUTED, _HOOK = "_xopt_computed_weight", "_xopt_weight_hook"  # in a module's __dict__


Held = tuple[nn.Module, str, torch.Tensor | None]
"""A module, the name of a parameter or buffer of it, and that."""


def held_by(module: nn.Module) -> Iterator[Held]:
    for name, tensor in (module._parameters | module._buffers).items():
        yield module, name, tensor


class ComputedWeight:
    def __init__(self, source: torch.dtype, target: torch.dtype, layout: dict[str, Any]) -> None:
        self._source, self._target, self._layout = source, target, layout
        self._state: Any = None
        self._packed: PackedParameter | None = None

    def of(self, module: Any) -> PackedParameter | None:
        """None: where it has to be computed by torch."""
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return None
        tensors = [tensor for _, _, tensor in self.made_from(module) if tensor is not None]
        if wants_gradient(*tensors):
            return None
        state = [*(_state_of(tensor) for tensor in tensors), *self.also(module)]
        if state != self._state:
            count_changes(*tensors)
            with torch.no_grad():
                weight = self.compute(module)
            self._packed = None
            if weight is not None and has_kernels(weight.device) and weight.dtype in FLOATING:
                dtype = self._target if weight.dtype == self._source else weight.dtype  # somebody has moved the model
                self._packed = PackedParameter.pack(weight, dtype, **self._layout)
            self._state = state
        return self._packed

    def made_from(self, module: Any) -> Iterator[Held]:
        for part in module.parametrizations["weight"].modules():
            yield from held_by(part)

    def also(self, module: Any) -> list[Any]:
        """What else it depends on."""
        return []

    def compute(self, module: Any) -> torch.Tensor | None:
        """None: there is none any more."""
        weight: torch.Tensor = module.weight
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> ComputedWeight:
        return type(self)(self._source, self._target, self._layout)

    def __reduce__(self) -> Any:
        return type(self), (self._source, self._target, self._layout)


class _OfHook(ComputedWeight):
    def made_from(self, module: Any) -> Iterator[Held]:
        return (each for each in held_by(module) if each[1] in ("weight_g", "weight_v", "weight_orig", "weight_u"))

    def compute(self, module: Any) -> torch.Tensor:
        hook = hook_of(module)
        options = {"do_power_iteration": False} if type(hook) is SpectralNorm else {}
        weight: torch.Tensor = hook.compute_weight(module, **options)
        return weight


class WithoutHook:
    """Stands before the class of a module whose weight a hook has computed: it is there without one."""

    @property
    def weight(self) -> torch.Tensor:
        return compute_weight(self)


def hook_of(module: nn.Module) -> Any:
    """The hook of torch's older functions that computes a module's weight, where nobody else has a hook there."""
    hooks: list[Any] = [*module._forward_pre_hooks.values()]
    if _HOOK in module.__dict__ or len(hooks) != 1 or type(hooks[0]) not in (WeightNorm, SpectralNorm):
        return module.__dict__.get(_HOOK)
    return hooks[0] if hooks[0].name == "weight" and "weight" in module.__dict__ else None


def before_class(module: nn.Module) -> type | None:
    """What has to stand before the class of a module with a computed weight."""
    return None if hook_of(module) is None else WithoutHook


def _state_of(tensor: torch.Tensor) -> tuple[int, int, torch.dtype]:
    """Differs once somebody has written to the tensor, or put other memory into it."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr(), tensor.dtype


def is_computed(module: nn.Module) -> bool:
    """Whether the weight, and nothing else, is parametrized, by torch's own means: others may do anything."""
    if not parametrize.is_parametrized(module):
        return hook_of(module) is not None
    made: Any = module.parametrizations
    steps = made["weight"] if list(made) == ["weight"] else ()
    return bool(steps) and all(type(each).__module__ == parametrizations.__name__ for each in steps)


def computed_problem(module: Any) -> str | None:
    """Why such a weight cannot be packed."""
    made_from = module if hook_of(module) is not None else module.parametrizations
    tensors = (*made_from.parameters(), *made_from.buffers())
    if any(not has_kernels(tensor.device) or tensor.dtype not in FLOATING for tensor in tensors):
        return "its weight is computed from parameters of another device or dtype"
    return None


def pack_computed(
    module: Any, dtype: torch.dtype | None, kind: type[ComputedWeight] = ComputedWeight, **layout: Any
) -> str:
    """`layout`: what `PackedParameter.pack` has to know."""
    hook = hook_of(module)
    with torch.no_grad():
        source: torch.dtype = module.weight.dtype
        computed = (kind if hook is None else _OfHook)(source, dtype or source, layout)
        module.__dict__[COMPUTED] = computed
        packed = computed.of(module)
    if hook is not None:
        module.__dict__[_HOOK] = hook
        module._forward_pre_hooks.clear()
        del module.__dict__["weight"]
    if packed is None:
        return "left to torch: the model is being traced"
    return f"packed as {dtype_name(packed.dtype)}, and again whenever what it is computed from changes"


def compute_weight(module: Any) -> torch.Tensor:
    """In its plain layout, with gradients of what it is made of."""
    computed: ComputedWeight = module.__dict__[COMPUTED]
    weight = computed.compute(module)
    if weight is None:
        raise RuntimeError(f"xopt: the forward of a {type(module).__name__} no longer computes its weight")
    return weight


def weight_of(module: Any) -> Any:
    """The parameter that holds a module's weight, be it packed or plain; None: there is none."""
    computed = module.__dict__.get(COMPUTED)
    return module._parameters.get("weight") if computed is None else computed.of(module)


def take_weight(seen: Seen, module: Any, weight: PackedParameter) -> Given | Part | None:
    """A layer's packed weight as an operand of a chain, which looks at what it was computed from."""
    computed: ComputedWeight | None = module.__dict__.get(COMPUTED)
    if computed is None:
        return seen.packed(module, "weight", weight.place.packed)
    for holder, name, _ in computed.made_from(module):
        seen.tensor(holder, name)
    return seen.own(weight.place.packed)
