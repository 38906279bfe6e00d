"""transformers' experts (Mixtral and its like): the matrices of all of them in one parameter, [expert, out, in].

A module that the library's `use_experts_implementation` has marked has two such parameters. Each is packed as one
weight, of which a product takes the columns of its expert. The tokens are sorted by expert, and what the experts give
is added up in fp32.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.integrations import moe

from xopt.graph.symbol import Symbol, recorder_of
from xopt.modules.base import Context, Replacement, derive, dtype_name, plain_parameter_problem, result_dtype
from xopt.modules.linear import product_of_columns
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import step
from xopt.modules.product import is_for_torch
from xopt.ops.fakes import FLOATING

_MARKS = frozenset({"has_gate", "has_bias", "is_transposed"})


class _Marked(type):
    def __instancecheck__(cls, module: Any) -> bool:
        return isinstance(module, nn.Module) and vars(module).keys() >= _MARKS and "down_proj" in module._parameters


class Experts(nn.Module, metaclass=_Marked):
    """To isinstance, whatever `use_experts_implementation` has marked: those classes have no other in common."""


class PackedExperts(Replacement, PackedState):
    """Computes with its packed weights, as PackedProduct does."""

    source: ClassVar[type[nn.Module]] = Experts
    switch: ClassVar[str] = "weights_prepack"
    on_cpu_only: ClassVar[bool] = True

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        if type(module).forward.__globals__ is not vars(moe) or "forward" in module.__dict__:
            return "it has a forward of its own"
        if getattr(module, "_is_expert_parallel", False):
            return "its experts are spread over several processes"
        for name in _names(module):
            problem = plain_parameter_problem(module, name)
            if problem:
                return problem
            if module._parameters[name].ndim != 3 or id(module._parameters[name]) in context.shared:
                return f"its {name} is no stack of matrices of its own"
        return None

    @classmethod
    def packed_names(cls, module: Any) -> tuple[str, ...]:
        return _names(module)

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        transposed = module.is_transposed
        for name in _names(module):
            module._parameters[name] = packed = context.pack(module._parameters[name], transposed)
        module.__class__ = derive(cls, type(module))
        return f"packed as {dtype_name(packed.dtype)}"

    def forward(self, hidden_states: Any, *routing: Any, **named: Any) -> torch.Tensor:
        if named or len(routing) != 2 or torch.compiler.is_compiling() or torch._C._is_tracing():
            return super().forward(hidden_states, *routing, **named)  # type: ignore[no-any-return]
        if type(hidden_states) is Symbol:
            return recorder_of(hidden_states).call_module(self, experts, hidden_states, *routing)  # type: ignore[no-any-return]
        if not _can_run(self, hidden_states, *routing):
            return super().forward(hidden_states, *routing)  # type: ignore[no-any-return]
        return experts(self, hidden_states, *routing)


def _names(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _can_run(module: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> bool:
    if hidden_states.ndim != 2 or hidden_states.device.type != "cpu" or is_for_torch(hidden_states, None):
        return False
    given = [module._parameters.get(name) for name in _names(module)]
    if not all(type(weight) is PackedParameter for weight in given) or weights.dtype not in FLOATING:
        return False
    wanted = weights.requires_grad or any(each.requires_grad for each in module.parameters())
    return not (torch.is_grad_enabled() and wanted)


@step("experts")
def experts(module: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`index` and `weights`: [token, choice], an expert that a token goes to, and what its answer counts."""
    if not _can_run(module, hidden_states, index, weights):
        return module(hidden_states, index, weights)  # type: ignore[no-any-return]
    up, down = _names(module)
    chosen, order = index.reshape(-1).sort(stable=True)
    tokens = order // index.shape[-1]
    counted = weights.reshape(-1)[order].float().unsqueeze(-1)
    inputs = hidden_states[tokens]
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    first = 0
    # A number that is none of an expert's says that nobody is to answer.
    for expert, count in enumerate(torch.bincount(chosen, minlength=module.num_experts)[: module.num_experts].tolist()):
        if count:
            own = slice(first, first + count)
            inside = _product(module, up, expert, inputs[own], result_dtype(hidden_states))
            inside = module._apply_gate(inside) if module.has_gate else module.act_fn(inside)
            answer = _product(module, down, expert, inside, torch.float32)
            if getattr(module, "has_post_expert_norm", False):  # a mark that not all versions set
                answer = module.post_expert_norm(answer)
            total.index_add_(0, tokens[own], answer * counted[own])
        first += count
    return total.to(hidden_states.dtype)


def _product(module: Any, name: str, expert: int, input: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    weight: PackedParameter = module._parameters[name]
    columns = weight.columns(expert)
    assert columns is not None, f"{name} is no stack"  # why_not looks
    bias = module._parameters[f"{name}_bias"][expert] if module.has_bias else None
    return product_of_columns(input, weight.place, columns, bias, {"out_dtype": out_dtype})
