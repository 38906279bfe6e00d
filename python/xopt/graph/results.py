"""What a recorded forward returns, and values within containers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from xopt.graph.signature import DICTS
from xopt.graph.steps import MAKES_RESULT
from xopt.graph.symbol import CannotRecord, SymbolicSize, is_symbol, named_results

if TYPE_CHECKING:
    from xopt.graph.record import Recorder


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(mapped(item, change) for item in value)
    if kind is SymbolicSize:
        return tuple(mapped(item, change) for item in value)
    if kind in DICTS:
        return kind((name, mapped(item, change)) for name, item in value.items())
    if kind is slice:
        return slice(mapped(value.start, change), mapped(value.stop, change), mapped(value.step, change))
    return change(value)


def returned(recorder: Recorder, result: Any) -> Any:
    """The result with the steps that make its containers, where those are not Python's own."""
    known = next((known for kind, known in named_results.items() if isinstance(result, kind)), None)
    if known is not None:
        named = returned(recorder, known.items(result))
        make = known.maker(result, recorder.examples(named))
        node = recorder.graph.call_function(make, (), recorder.nodes(named))
        node.meta[MAKES_RESULT] = True
        return node
    if type(result) is SymbolicSize:
        return recorder.graph.call_function(torch.Size, (recorder.nodes(result),))
    if type(result) in (tuple, list):
        return type(result)(returned(recorder, item) for item in result)
    if type(result) is dict:
        return {name: returned(recorder, item) for name, item in result.items()}
    if type(result) is OrderedDict:
        items = [(name, returned(recorder, item)) for name, item in result.items()]
        node = recorder.graph.call_function(OrderedDict, (recorder.nodes(items),))
        node.meta[MAKES_RESULT] = True
        return node
    if not is_symbol(result) and not isinstance(result, (type(None), bool, int, float, str)):
        raise CannotRecord(f"it returns a {type(result).__name__}")
    return result
