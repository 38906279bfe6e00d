"""Layers of transformers' caches, which grow by what each step gives: their `update` is recorded like a forward.

So a step of a language model is one chain, with what caches held before in front of it and what they hold from then on
behind. All of that is there at once, which is why it is for caches of up to `_MOST_BYTES`; larger ones, and others,
are updated one layer at a time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from xopt.graph.symbol import Symbol, opaque_reads
from xopt.integrations.state_layers import has_known_states, has_states, has_states_only

_GROWING = (DynamicLayer.update, DynamicSlidingWindowLayer.update)
_MOST_BYTES = 2**28


class _Recorded:
    """A layer during a recording: what is read of it is read in each call, and what is set is set at the end of each.
    Numbers and flags are taken for granted, but for those that an update changes."""

    def __init__(self, symbol: Symbol, changing: frozenset[str]) -> None:
        vars(self).update(_xopt_symbol=symbol, _xopt_changing=changing, _xopt_read={})

    def __getattr__(self, name: str) -> Any:
        symbol: Symbol = self._xopt_symbol
        recorder = symbol._recorder
        found = getattr(symbol._example, name)
        if isinstance(found, torch.Tensor) or name in self._xopt_changing:
            value = recorder.record("call_function", getattr, (symbol, name), {}, found)
            if isinstance(found, torch.Tensor):
                recorder.expect_dtype(value)
        else:
            value = recorder.read_constant(symbol, name)
        vars(self)[name] = self._xopt_read[name] = value
        return value

    def begin(self, layer: Any) -> None:
        """To be what this one is, which was empty before its first update, as far as that made it so: what else it has
        (states) others may set meanwhile."""
        empty = vars(self._xopt_symbol._example)
        for name, value in vars(layer).items():
            if not isinstance(value, torch.Tensor):
                if name not in empty or empty[name] != value:
                    vars(self)[name] = value
            elif value.numel() == 0:
                vars(self)[name] = torch.tensor([], dtype=value.dtype, device=value.device)

    def settings(self) -> dict[str, Any]:
        """What was set."""
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_xopt_") and value is not self._xopt_read.get(name)
        }


def _update(cache: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **named: Any) -> Any:
    """What a cache answers with, out of a copy of the layer, which stays as it is."""
    if layer >= len(cache.layers):  # it is made in the update, and has nothing to add
        return keys, values
    return copy.deepcopy(cache.layers[layer]).update(keys, values, *rest, **named)


def _recorded_update(symbol: Symbol, keys: Any, values: Any, layer: int, *rest: Any, **named: Any) -> Any:
    recorder = symbol._recorder
    recorded = _recorded_layer(symbol, layer) or _record_layer(symbol, keys, values, layer)
    if recorded is not None:
        update: Callable[..., Any] = type(recorded._xopt_symbol._example).update
        result = update(recorded, keys, values, *rest, **named)
        for name, value in recorded.settings().items():
            recorder.set_late(recorded._xopt_symbol, name, value)
        return result
    args = (keys, values, layer, *rest)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        example = _update(symbol._example, *recorder.examples(args), **recorder.examples(named))
    recorder.do_late_settings()  # of what the layer holds besides
    return recorder.effect("call_method", "update", (symbol, *args), named, example)


def _recorded_layer(symbol: Symbol, layer: int) -> _Recorded | None:
    """One that was updated before in this recording."""
    layers = getattr(symbol._example, "self_attention_cache", symbol._example).layers
    return symbol._recorder.kept.get(("layer", id(layers[layer]))) if layer < len(layers) else None


def _record_layer(symbol: Symbol, keys: Any, values: Any, place: int) -> _Recorded | None:
    """None: it has to be updated as it is."""
    recorder = symbol._recorder
    layers = None if recorder.has_effects else _layers_that_grow(symbol)
    if layers is None or place >= len(layers._example):
        return None
    layer = layers._example[place]
    recorder.expect(_is_of, layers[place], type(layer))
    begun, after = copy.deepcopy(layer), copy.deepcopy(layer)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        examples = recorder.examples((keys, values))
        if not layer.is_initialized:
            begun.lazy_initialization(*examples)
        after.update(*examples)
    known, updated = vars(layer), vars(after)
    changing = frozenset(name for name, value in known.items() if type(value) is int and updated[name] != value)
    recorded = recorder.kept[("layer", id(layer))] = _Recorded(layers[place], changing)
    if not layer.is_initialized:
        recorded.begin(begun)
    return recorded


def _layers_that_grow(symbol: Symbol) -> Any:
    """Of a cache, if they all do, and can be set at the end; asked once a recording."""
    recorder = symbol._recorder
    key = "layers", symbol._node
    if key not in recorder.kept:
        layers = recorder.read(symbol, "layers")
        moves = recorder.read_constant(symbol, "offloading")
        known = type(symbol._example).update is Cache.update and not moves
        grow = known and (recorder.expect(_grow, layers, None) or recorder.expect(_are_empty, layers, None))
        recorder.kept[key] = layers if grow else None
    return recorder.kept[key]


def _grow(layers: list[Any], _: None) -> bool:
    """Whether all layers have something that they add to, are different ones, and not too large to be there twice. Of
    those that have states of one size nothing is asked."""
    size = 0
    for layer in layers:
        if has_states_only(layer):
            continue
        if not _is_growing(layer) or type(layer.keys) is not torch.Tensor:
            return False
        size += 2 * layer.keys.nbytes
    return 0 < size <= _MOST_BYTES and len(set(map(id, layers))) == len(layers)


def _are_empty(layers: list[Any], _: None) -> bool:
    """Whether all layers are such, and none has anything yet."""
    empty = all(has_states_only(layer) or (_is_growing(layer) and not layer.is_initialized) for layer in layers)
    return empty and len(set(map(id, layers))) == len(layers) > 0


def _is_growing(layer: Any) -> bool:
    is_known = isinstance(layer, CacheLayerMixin) and (has_known_states(layer) or not has_states(layer))
    return is_known and type(layer).update in _GROWING


def _is_of(layer: Any, kind: type) -> bool:
    return type(layer) is kind


def _stored(name: str) -> Callable[[Symbol], Any]:
    """What a layer holds, which may have been updated."""

    def read(symbol: Symbol) -> Any:
        recorded = symbol._recorder.kept.get(("layer", id(symbol._example)))
        return symbol._recorder.read(symbol, name) if recorded is None else getattr(recorded, name)

    return read


def _sizes(name: str, place: int) -> Callable[[Symbol], Callable[..., Any]]:
    """A method that answers with sizes of a layer, which grow with the cache. `place`: where it is told which layer."""

    def read(symbol: Symbol) -> Callable[..., Any]:
        def method(*given: Any, layer_idx: int = 0) -> Any:
            recorder = symbol._recorder
            layer = given[place] if len(given) > place else layer_idx
            if type(layer) is not int or _recorded_layer(symbol, layer) is not None:
                recorder.do_late_settings()
            arguments = (*given[:place], layer)
            example = getattr(symbol._example, name)(*recorder.examples(arguments))
            return recorder.record("call_method", name, (symbol, *arguments), {}, example)

        return method

    return read


opaque_reads[Cache, "update"] = lambda symbol: functools.partial(_recorded_update, symbol)
for _name in ("keys", "values"):
    opaque_reads[CacheLayerMixin, _name] = _stored(_name)
for _name, _place in (("get_seq_length", 0), ("get_query_offset", 0), ("get_mask_sizes", 1)):
    opaque_reads[Cache, _name] = _sizes(_name, _place)
