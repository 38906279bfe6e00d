"""Caches of transformers' that a forward makes and answers with, as language models do that are called without one.

Its layers hold symbols once the forward has been recorded. A program makes another such cache in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from xopt.graph.symbol import CannotRecord, NamedResult, Symbol, is_symbol, named_results
from xopt.integrations.state_layers import has_states

_CONSTANTS = (type(None), bool, int, float, str, type, torch.dtype, torch.device)
Build = Callable[[dict[str, Any]], Any]


def _template(value: Any, name: str, symbols: dict[str, Symbol]) -> Build:
    """What makes such a value anew, by the names of the symbols that were found in it."""
    if is_symbol(value):
        symbols[name] = value
        return lambda named: named[name]
    kind = type(value)
    if kind in (list, tuple):
        items = [_template(each, f"{name}_{place}", symbols) for place, each in enumerate(value)]
        return lambda named: kind([build(named) for build in items])
    if kind is dict:
        values = {key: _template(each, f"{name}_{key}", symbols) for key, each in value.items()}
        return lambda named: {key: build(named) for key, build in values.items()}
    if isinstance(value, (Cache, CacheLayerMixin)) or has_states(value):
        attributes = _template(vars(value), name, symbols)

        def build(named: dict[str, Any]) -> Any:
            made = object.__new__(kind)
            vars(made).update(attributes(named))
            return made

        return build
    if kind is torch.Tensor and value.dim() == 0:  # of numbers, such as a window's size
        return lambda named: value.clone()
    if isinstance(value, _CONSTANTS):
        return lambda named: value
    raise CannotRecord(f"its {name} holds a {kind.__name__}")


def _symbols(cache: Cache) -> dict[str, Any]:
    found: dict[str, Symbol] = {}
    _template(cache, "cache", found)
    return dict(found)


def _maker(cache: Cache, _: dict[str, Any]) -> Callable[..., Any]:
    build = _template(cache, "cache", {})

    def make(**named: Any) -> Any:
        return build(named)

    return make


named_results[Cache] = NamedResult(_symbols, _maker)
