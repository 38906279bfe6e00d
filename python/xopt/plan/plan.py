"""Decides for every module of a model whether it is replaced, and why not. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from xopt import modules  # noqa: F401 - finds the replacements
from xopt.config import Config
from xopt.modules.base import Context, Replacement, is_quantized
from xopt.modules.packed_state import PackedState

# As torch has them, these never call their children but read their weights, so a packed one would be unpacked in each
# call. Replaced, they do call them.
_READS_ITS_CHILDREN = (nn.MultiheadAttention,)


@dataclass(frozen=True)
class Decision:
    path: str
    """The module's name in the model; "" for the model itself."""
    module: nn.Module
    replacement: type[Replacement] | None
    reason: str = ""
    """Why it stays as it is, where it does."""


def make_plan(model: nn.Module, config: Config, context: Context) -> list[Decision]:
    """One decision for each module that has parameters of its own. `context.shared` is filled on the way."""
    decisions = list(_decide(model, config, context))
    _find_shared(decisions, context)
    return decisions


def _decide(model: nn.Module, config: Config, context: Context) -> Iterator[Decision]:
    untouchable: dict[int, str] = {}
    for path, module in model.named_modules():
        decision = _decide_one(path, module, untouchable.get(id(module)), config, context)
        for child in module.children():
            if isinstance(module, _READS_ITS_CHILDREN) and decision.replacement is None:
                untouchable[id(child)] = f"{type(module).__name__} reads its weight itself"
            elif id(module) in untouchable:
                untouchable[id(child)] = untouchable[id(module)]
            elif isinstance(module, torch.jit.ScriptModule):
                untouchable[id(child)] = "it belongs to a TorchScript module"
        if is_quantized(module):
            yield Decision(path, module, None, "it is quantized already")
            continue
        if not module._parameters and not any(kind.is_candidate(module) for kind in _replacements()):
            continue
        yield decision


def _decide_one(path: str, module: nn.Module, untouchable: str | None, config: Config, context: Context) -> Decision:
    if isinstance(module, Replacement | PackedState):
        return Decision(path, module, None, "it is optimized already")
    problem = ""
    for replacement in _replacements():
        if (problem and not replacement.comes_last) or not replacement.is_candidate(module):
            continue
        if not getattr(config, replacement.switch):
            return Decision(path, module, None, f"Config({replacement.switch}=False)")
        reason = untouchable or _device_problem(module, replacement) or replacement.why_not(module, context)
        if not reason:
            return Decision(path, module, replacement)
        problem = problem or reason
    return Decision(path, module, None, problem or "there is nothing to pack; it may be fused with its block")


def _device_problem(module: nn.Module, replacement: type[Replacement]) -> str | None:
    for parameter in module._parameters.values():
        if replacement.on_cpu_only and parameter is not None and not parameter.is_cpu:
            return f"it is on {parameter.device}, for which it has no kernel"
    return None


def _replacements() -> list[type[Replacement]]:
    """Those of the most special classes first."""
    return sorted(
        Replacement.__subclasses__(),
        key=lambda each: (each.comes_last, -len(each.source.__mro__), -len(each.__mro__)),
    )


def _find_shared(decisions: list[Decision], context: Context) -> None:
    """A weight that several kinds of modules share is packed where all of them can read it so, and plain elsewhere."""
    readers: dict[int, set[type[Replacement] | None]] = {}
    on_cpu: set[int] = set()
    for decision in decisions:
        for parameter in decision.module._parameters.values():
            if parameter is not None:
                readers.setdefault(id(parameter), set()).add(decision.replacement)
                if parameter.is_cpu:
                    on_cpu.add(id(parameter))
    for key, kinds in readers.items():
        # Those who do not pack read rows, which on other devices has no kernel.
        if all(kind is not None and kind.reads_packed and (kind.packs or key in on_cpu) for kind in kinds):
            if any(kind is not None and kind.packs for kind in kinds):
                context.packed.add(key)
        elif len(kinds) > 1:
            context.shared.add(key)
