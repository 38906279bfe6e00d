"""What a forward computes from its module's own parameters alone, step by step.

Two formulas that are equal give the same values while the parameters are what they are. Constants are part of one: a
gain that a call is given, or the size of a batch, makes it another. A change of dtype is none, since what is packed has
a dtype of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from xopt.graph.parts import name_of
from xopt.graph.record import EXAMPLE, active
from xopt.graph.symbol import may_write
from xopt.modules.pattern import TO_DTYPES, is_cast

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    str,
    type(...),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)


class Formula(NamedTuple):
    result: Any
    """The name of a parameter, or the number of a step; of a step with several results also which of them."""
    steps: tuple[Any, ...]


class Trace(TorchFunctionMode):
    """Sees what a forward computes with tensors. Steps that it can say nothing about give tensors without a formula."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        held = {**module._parameters, **module._buffers}
        # With the tensors themselves, or another one could get the id of one that is gone.
        self._known = {id(tensor): (tensor, Formula(name, ())) for name, tensor in held.items() if tensor is not None}
        self._steps: list[Any] = []

    def formula(self, value: Any) -> Formula | None:
        """None: it is not computed from parameters alone, as far as that can be told."""
        _, found = self._known.get(id(value), (None, None))
        return found and Formula(found.result, tuple(self._steps[: _number(found.result) + 1]))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.call(function, args, kwargs)
        if active.recorder is not None:  # its symbols say what they are computed from
            return result
        if may_write(function, kwargs):
            if self._may_be_known(kwargs.get("out", args[0] if args else None)):
                self._known.clear()
        elif isinstance(result, (torch.Tensor, tuple, list)) and id(result) not in self._known:
            self._note(function, args, kwargs, result)
        return result

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def _may_be_known(self, written: Any) -> bool:
        """Whether a tensor that was written to shares memory with one that there is a formula for."""
        if type(written) is not torch.Tensor:
            return True
        memory = written.untyped_storage().data_ptr()
        return any(tensor.untyped_storage().data_ptr() == memory for tensor, _ in self._known.values())

    def _note(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        try:
            if name_of(function) in TO_DTYPES and result.is_floating_point():
                self._known[id(result)] = result, Formula(self._result_of(args[0]), ())
                return
            step = function, _told(args, self._result_of), _told(kwargs, self._result_of)
        except LookupError:
            return
        number = len(self._steps)
        self._steps.append(step)
        if type(result) is torch.Tensor:
            self._known[id(result)] = result, Formula(number, ())
            return
        for index, part in enumerate(result):
            if type(part) is torch.Tensor:
                self._known[id(part)] = part, Formula((number, index), ())

    def _result_of(self, tensor: Any) -> Any:
        return self._known[id(tensor)][1].result


def formula_of_node(node: Node, names: dict[Any, str]) -> Formula | None:
    """The same of a recorded value. `names`: those of the module's parameters, by what their nodes are called."""
    steps: list[Any] = []
    known: dict[Node, Any] = {}

    def result_of(each: Any) -> Any:
        if not isinstance(each, Node) or each.op == "placeholder":
            raise LookupError
        if each.op == "get_attr":
            return names[each.target]
        if each not in known:
            if is_cast(each) and each.meta[EXAMPLE].dtype.is_floating_point:
                known[each] = result_of(each.args[0])
            else:
                step = _one_name(each.target), _told(each.args, result_of), _told(each.kwargs, result_of)
                known[each] = len(steps)
                steps.append(step)
        return known[each]

    try:
        return Formula(result_of(node), tuple(steps))
    except LookupError:
        return None


def _number(result: Any) -> int:
    """Of the step; -1: it is a parameter."""
    return -1 if type(result) is str else result[0] if type(result) is tuple else result


def _one_name(target: Any) -> Any:
    """Of a recorded step: which of a parameter and a symbol is asked to add them does not matter."""
    name = name_of(target)
    if type(target) is not str and getattr(operator, name, None) is not target:
        return target
    name = name.strip("_")
    return {"truediv": "div", "floordiv": "floor_divide"}.get(name, name)


class _Result(NamedTuple):
    """Of a step, among the arguments of another, where numbers are constants."""

    of: Any


def _told(value: Any, result_of: Callable[[Any], Any]) -> Any:
    """An argument in words that can be compared. LookupError: there are none."""
    if isinstance(value, (torch.Tensor, Node)):
        return _Result(result_of(value))
    if isinstance(value, (tuple, list)):
        return tuple(_told(each, result_of) for each in value)
    if isinstance(value, dict):
        return tuple((name, _told(value[name], result_of)) for name in sorted(value))
    if isinstance(value, slice):
        return slice, *(_told(each, result_of) for each in (value.start, value.stop, value.step))
    if not isinstance(value, _CONSTANTS):
        raise LookupError
    return type(value) is bool, value
