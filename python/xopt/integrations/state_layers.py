"""Layers of transformers' caches that hold states of one size, which each step writes anew: those of convolutions and
of what linear attention and state spaces remember (Qwen3-Next, Mamba, Granite's hybrids).

While a forward is recorded, a layer is asked what it holds in each call, answers with what the forward has made of
that, and is written to when all else is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers import Cache, cache_utils

from xopt.graph.late import reads_objects
from xopt.graph.symbol import CannotRecord, Symbol, opaque_reads

_MIXIN: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
_LAYER: Any = getattr(cache_utils, "LinearAttentionLayer", None)
_WITH_KEYS = tuple(
    getattr(cache_utils, name)
    for name in ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
    if hasattr(cache_utils, name)
)


def has_states(layer: Any) -> bool:
    return _MIXIN is not None and isinstance(layer, _MIXIN)


def has_states_only(layer: Any) -> bool:
    """Whether it is such a layer of transformers' own, and has nothing else."""
    return _LAYER is not None and type(layer) is _LAYER


def has_known_states(layer: Any) -> bool:
    """Whether it is one, whatever else it has."""
    return has_states_only(layer) or type(layer) in _WITH_KEYS


_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")


def _flags(layer: Any, state: int) -> tuple[Any, ...]:
    return (layer.record_past, *(getattr(layer, name)[state] for name in _FLAGS))


def _has_flags(layer: Any, known: tuple[int, tuple[Any, ...]]) -> bool:
    return has_known_states(layer) and _flags(layer, known[0]) == known[1]


def state_of(layer: Any, name: str, state: int) -> torch.Tensor:
    """The step of a recorded graph that tells what a layer holds."""
    found: torch.Tensor = getattr(layer, name)[state]
    return found


reads_objects.add(state_of)


class _States:
    """One state of a layer during a recording."""

    def __init__(self, cache: Symbol, place: int, state: int) -> None:
        self._recorder: Any = cache._recorder
        layers = cache.layers
        layer = layers._example[place]
        if not has_known_states(layer):
            raise CannotRecord(f"it has a {type(layer).__name__} in its cache")
        self._layer, self._state = layers[place], state
        known = _flags(layer, state)
        self._recorder.expect(_has_flags, self._layer, (state, known))
        records_past, has_convs, has_recurrent, self.is_written, self._kernel = known
        if records_past:
            raise CannotRecord("its cache keeps what was before")
        self._convs = self._read("conv_states") if has_convs else None
        self._recurrent = self._read("recurrent_states") if has_recurrent else None

    def _read(self, name: str) -> Symbol:
        example = state_of(self._layer._example, name, self._state)
        read: Symbol = self._recorder.record("call_function", state_of, (self._layer, name, self._state), {}, example)
        self._recorder.expect_dtype(read)
        self._recorder.changes.may_be_written(read)
        return read

    def convs(self) -> Any:
        return self._convs if self.is_written else None

    def recurrent(self) -> Any:
        return self._recurrent if self.is_written else None

    def write_convs(self, given: Any, kernel: int | None) -> Any:
        """What a layer answers with: all that the convolution is to go over."""
        if self.is_written and self._convs is not None:
            before: Any = self._convs
            full: Any = torch.cat([before, given], dim=-1)
            before.copy_(full[..., -self._kernel :])
            return full
        if self._convs is not None or kernel is None:
            raise CannotRecord("its cache was reset")
        self._write_late(_LAYER.update_conv_state, given, kernel)
        full = functional.pad(given, (kernel - given.shape[-1], 0)) if given.shape[-1] < kernel else given
        self._kernel, self.is_written = kernel, True
        self._convs = full[..., -kernel:]
        return full

    def write_recurrent(self, given: Any) -> Any:
        if self._recurrent is not None:
            self._recurrent.copy_(given)
        else:
            self._write_late(_LAYER.update_recurrent_state, given)
            self._recurrent = given
        return self._recurrent

    def _write_late(self, update: Callable[..., Any], given: Any, *options: Any) -> None:
        """The layer's first, which makes it as large as that."""
        key = update, self._layer._node, self._state
        self._recorder.call_late(key, update, (self._layer, given, self._state, *options))


def _states(cache: Symbol, place: int, state: int) -> _States:
    kept: dict[Any, Any] = cache._recorder.kept
    key = "states", cache._node, place, state
    if key not in kept:
        kept[key] = _States(cache, place, state)
    found: _States = kept[key]
    return found


def _convs_of(cache: Symbol) -> Callable[..., Any]:
    return lambda layer_idx, state_idx=0: _states(cache, layer_idx, state_idx).convs()


def _recurrent_of(cache: Symbol) -> Callable[..., Any]:
    return lambda layer_idx, state_idx=0: _states(cache, layer_idx, state_idx).recurrent()


def _update_convs(cache: Symbol) -> Callable[..., Any]:
    def update(conv_states: Any, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None) -> Any:
        return _states(cache, layer_idx, state_idx).write_convs(conv_states, conv_kernel_size)

    return update


def _update_recurrent(cache: Symbol) -> Callable[..., Any]:
    def update(recurrent_states: Any, layer_idx: int, state_idx: int = 0) -> Any:
        return _states(cache, layer_idx, state_idx).write_recurrent(recurrent_states)

    return update


def _was_written(cache: Symbol) -> Callable[..., Any]:
    def ask(layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        layers = cache._example.layers
        places = [place for place, layer in enumerate(layers) if has_states(layer)]
        place = places[-1] if layer_idx is None and places else layer_idx
        if place is None or place >= len(layers) or layers[place].number_of_states != 1:
            raise CannotRecord("it reads .has_previous_state of a cache")
        return bool(_states(cache, place, state_idx or 0).is_written)

    return ask


def _records_past(cache: Symbol) -> Callable[..., Any]:
    def ask(layer_idx: int) -> bool:
        _states(cache, layer_idx, 0)  # of which none does
        return False

    return ask


def _is_known() -> bool:
    """Whether this version's layers are the ones that are told of here."""
    if _LAYER is None or not all(hasattr(Cache, name) for name in ("get_conv_state", "get_recurrent_state")):
        return False
    return "conv_kernel_size" in inspect.signature(_LAYER.update_conv_state).parameters


if _is_known():
    opaque_reads[Cache, "get_conv_state"] = _convs_of
    opaque_reads[Cache, "get_recurrent_state"] = _recurrent_of
    opaque_reads[Cache, "update_conv_state"] = _update_convs
    opaque_reads[Cache, "update_recurrent_state"] = _update_recurrent
    opaque_reads[Cache, "has_previous_state"] = _was_written
    opaque_reads[Cache, "is_recording_past"] = _records_past
    opaque_reads[_LAYER, "record_past"] = lambda layer: layer._recorder.read_constant(layer, "record_past")
