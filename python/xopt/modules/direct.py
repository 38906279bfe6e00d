"""A whole model's forward that nothing has to be set up for, since a program of it is known.

To enter autocast and a layout, and to leave them, takes 25 calls of Python's: as long as some layers of a small image.
A program that is little but a chain needs neither while the chain runs natively. Where anything else is the case, the
forward goes its whole way, which knows all others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx import Graph, Node
from torch.nn.modules import module as modules_of_torch

from xopt.graph.late import EFFECT
from xopt.graph.parts import name_of
from xopt.graph.program import Program
from xopt.graph.record import active
from xopt.graph.signature import signature
from xopt.graph.steps import MAKES_RESULT, OtherSizes, expect
from xopt.modules import channels_last
from xopt.modules.chain import Chain, natively
from xopt.modules.computed_once import ComputedOnce
from xopt.modules.containers import map_tensors
from xopt.modules.flow import Flow
from xopt.modules.layout import Layout, contiguous

_MOST_SKIPPED = 63
# What gives the same under autocast and without it.
_PLAIN = frozenset(
    {
        *("size", "numel", "expand", "expand_as", "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze"),
        *("flatten", "contiguous", "to", "float", "bfloat16", "half", "getitem", "getattr", "embedding", "gather"),
        *("arange", "cat", "cos", "sin", "add", "sub", "mul", "floordiv", "neg", "get_seq_length"),
        *("abs", "log", "truediv", "min", "where", "full_like", "zeros_like", "masked_fill"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_"),
    }
)


def is_direct(graph: Graph) -> bool:
    """Whether a program looks at nothing that a whole model's forward sets up."""
    return all(map(_is_plain, graph.nodes))


def _is_plain(node: Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output") or node.target is expect or EFFECT in node.meta:
        return True
    if isinstance(node.target, ComputedOnce):
        return is_direct(node.target.graph)
    is_chain = isinstance(getattr(node.target, "__self__", None), Chain)
    return is_chain or MAKES_RESULT in node.meta or name_of(node.target) in _PLAIN


class Direct:
    """The way of a model. For calls that nobody compiles or traces."""

    def __init__(self, layout: Layout, flow: Flow | None) -> None:
        self._layout = layout
        self._flow = flow
        self._skipped, self._to_skip = 0, 0

    def __call__(self, module: nn.Module, programs: Any, args: Any, kwargs: Any) -> Any:
        """The result, or NotImplemented. What came to nothing is tried again after more and more calls."""
        self._skipped += 1
        if self._skipped <= self._to_skip or module.training or torch.is_grad_enabled() or active.recorder is not None:
            return NotImplemented
        if modules_of_torch._global_forward_hooks or modules_of_torch._global_forward_pre_hooks:
            return NotImplemented
        if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
            return NotImplemented
        key, values = signature(args, kwargs)
        inside = self._layout.is_ready_for((*args, *kwargs.values()))
        under_autocast = key[0] is not None or key[1] is not None
        if inside is None or under_autocast or torch._C._is_torch_function_mode_enabled():
            return NotImplemented
        flow = self._flow
        found = programs.known((None, inside, key) if flow is None else (flow.source, inside, (flow.inside, *key[1:])))
        if not found:
            return NotImplemented
        state, before = channels_last.state, channels_last.state.inside
        state.inside, natively.on = inside, True
        try:
            result = _first_that_holds(found, module, values)
        finally:
            state.inside, natively.on = before, False
        self._skipped, self._to_skip = 0, min(2 * self._to_skip + 1, _MOST_SKIPPED) if result is NotImplemented else 0
        return map_tensors(contiguous, result) if self._layout.given and result is not NotImplemented else result


def _first_that_holds(programs: list[Program], module: nn.Module, values: list[Any]) -> Any:
    for program in programs:
        if not program.is_direct or not program.may_run():
            break
        try:
            return program(module, values)
        except OtherSizes:
            continue
        except Exception:  # whatever is wrong: the whole way says it
            break
    return NotImplemented
