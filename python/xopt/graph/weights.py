"""How a recording hears of functions of torch's that are called with no symbol of a tensor."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from xopt.graph.symbol import CannotRecord, has_symbolic_objects, is_symbolic, may_write, writes

if TYPE_CHECKING:
    from xopt.graph.record import Recorder

_TRANSPOSING: dict[Any, str] = {getattr(torch.Tensor, name).__get__: name for name in ("T", "mT")}
# What makes plain numbers, which no step of a program would make anew, of tensors.
_GIVING_NUMBERS = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"}
)


class WeightsToo(TorchFunctionMode):
    """Records what a forward does to parameters and buffers alone (Gemma's 1 + weight), and what it makes by sizes, as
    steps of its own.

    Constants that a forward makes are no symbols: a function may keep what it returns (functools.lru_cache)."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if is_symbolic(args, kwargs):
            if function is torch.Tensor.__getitem__:  # to torch's own, a symbol that is an index is a sequence
                return recorder.call(operator.getitem, *args, **kwargs)
            if not has_symbolic_objects(args, kwargs):  # sizes, and what is no symbol
                return recorder.call(function, *args, **kwargs)
        name = getattr(function, "__name__", "")
        if not any(recorder.knows(value) for value in (*args, *kwargs.values())):
            if name in _GIVING_NUMBERS and recorder.has_drawn():
                raise CannotRecord("it makes random numbers")
            if may_write(function, kwargs) and recorder.held.share_memory((args, kwargs)):
                raise CannotRecord("it changes a tensor in place that a module holds")
            result = function(*args, **kwargs)
            recorder.constants.note(result, function, args, kwargs)
            return result
        if function in _TRANSPOSING:
            return getattr(recorder.symbol_of(args[0]), _TRANSPOSING[function])
        if name == "__get__":  # a dtype, a shape
            return function(*args, **kwargs)
        if is_symbolic(args, kwargs):
            return function(*args, **kwargs)
        if writes(name):
            raise CannotRecord("it changes a parameter in place")
        result = function(*args, **kwargs)
        parts = result if type(result) in (tuple, list) and result else (result,)
        return recorder.call(function, *args, **kwargs) if isinstance(parts[0], torch.Tensor) else result
