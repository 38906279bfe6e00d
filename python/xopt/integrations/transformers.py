"""transformers: an attention function of its own, registered the way that library provides for.

It stands in place of "sdpa", and is xopt's where an optimized model calls it; what other models call stays as it was.
It takes what transformers' sdpa takes; what the kernel does not do (dropout, soft caps, paged caches) goes on to that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.fx import Node
from transformers import (
    AttentionInterface,
    Cache,
    EncoderDecoderCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils.generic import ModelOutput

from xopt.graph.signature import opaque_states
from xopt.graph.symbol import (
    CannotRecord,
    is_symbolic,
    named_results,
    opaque_reads,
    recorder_of,
)
from xopt.integrations import (  # noqa: F401 - their rules
    cache_layers,
    causal_convs,
    delta_rule,
    experts,
    made_caches,
    output_hooks,
    selective_states,
    state_spaces,
)
from xopt.integrations.outputs import OUTPUT
from xopt.modules.attention import attend, attention_call, attention_steps, can_attend, is_plain_attention
from xopt.modules.base import Context, Replacement, own_forward
from xopt.modules.block import PROGRAMS
from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.linear import PackedProduct
from xopt.modules.pattern import step
from xopt.modules.product import product_problem

# What transformers' sdpa never looks at makes no difference: models hand on whatever their callers gave them.
_READ_BY_SDPA = frozenset(
    {each for each in sdpa_attention_forward.__code__.co_consts if isinstance(each, str)}
    | set(inspect.signature(sdpa_attention_forward).parameters)
) - {"output_attentions", "kwargs"}


def xopt_attention(
    module: torch.nn.Module,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """The contract of transformers' attention functions: ([batch, queries, heads, depth], no weights)."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    unusual = dropout or any(name in _READ_BY_SDPA and given is not None for name, given in kwargs.items())
    if is_symbolic((query, key, value, attention_mask, position_bias), kwargs):
        recorder = recorder_of(query)
        stored = "_attn_implementation_internal"  # what the other is a property of
        recorder.watch(module.config, stored if stored in vars(module.config) else "_attn_implementation")
        if unusual:
            raise NotImplementedError("attention with " + ", ".join(kwargs))
        if position_bias is not None and attention_mask is not None:  # a step of its own
            attention_mask, position_bias = _with_bias(position_bias, attention_mask, causal, query, key), None
        tensors = (query, key, value, attention_mask, position_bias)
        return recorder.call(attention_step, *tensors, causal=causal, scaling=scaling), None
    if unusual or not can_attend(query, key, value, attention_mask):
        named: dict[str, Any] = {"is_causal": is_causal, "position_bias": position_bias, **kwargs}
        result: tuple[Any, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **named
        )
        return result
    return attention_step(query, key, value, attention_mask, position_bias, causal=causal, scaling=scaling), None


@step("attention")
def attention_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    # One query sees all keys; several stand at the beginning of the keys, which is what transformers means here.
    causal = causal and query.shape[2] > 1
    if position_bias is not None:
        mask = _with_bias(position_bias, mask, causal, query, key)
        causal = False
    return attend(query, key, value, mask, causal=causal, scale=scaling)


attention_steps[attention_step] = "scaling"


def _has_one_mask(node: Node) -> bool:
    """Whether nothing has to be added up, nor made, to have it."""
    mask, bias = node.args[3:5]
    one = bias is None or (mask is None and not node.kwargs["causal"])
    return one and is_plain_attention(node, mask if bias is None else bias)


@chainable(attention_step, where=_has_one_mask)
def _attention_call(
    seen: Seen,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    position_bias: Value | None,
    *,
    causal: bool,
    scaling: float | None,
) -> Call:
    mask = mask if position_bias is None else position_bias
    return attention_call(query, key, value, mask, causal=causal, scale=scaling, one_sees_all=True)


def _with_bias(bias: torch.Tensor, mask: torch.Tensor | None, causal: bool, query: Any, key: Any) -> torch.Tensor:
    """One additive mask of a position bias and what else hides keys."""
    if mask is None and causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
    return bias + mask


@functools.wraps(sdpa_attention_forward)
def attention_in_its_place(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, None]:
    """What "sdpa" stands for: xopt's in blocks of models that were optimized so, and elsewhere what it was."""
    programs = module.__dict__.get(PROGRAMS)
    if programs is not None and programs.config.fuse_attention:
        return xopt_attention(module, *args, **kwargs)
    result: tuple[Any, None] = sdpa_attention_forward(module, *args, **kwargs)
    return result


def take_attention() -> None:
    """Not under a name of our own: models ask for "sdpa", and then put into the mask which keys an indexer chose, or
    make masks of another kind. A function that somebody else has registered stays."""
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
        AttentionInterface.register("sdpa", attention_in_its_place)


# ---- Caches of encoder-decoders -------------------------------------------------------------------------------------


def _state(cache: EncoderDecoderCache) -> Any:
    """What a layer's forward branches on: whose keys of the encoder's states are there already."""
    return tuple(cache.is_updated.items()), len(cache.cross_attention_cache) > 0


class _Updated:
    """The flags of a cache during a recording: read as they are in all calls of this kind, written in each call."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._flags = dict(cache._example.is_updated)

    def get(self, layer: int, default: Any = None) -> Any:
        return self._flags.get(layer, default)

    def __getitem__(self, layer: int) -> Any:
        return self._flags[layer]

    def __setitem__(self, layer: int, flag: bool) -> None:
        self._flags[layer] = flag
        self._cache._recorder.effect("call_function", set_updated, (self._cache, layer, flag), {})


def set_updated(cache: EncoderDecoderCache, layer: int, flag: bool) -> None:
    cache.is_updated[layer] = flag


def _kept(name: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A read that gives the same each time."""

    def read(symbol: Any) -> Any:
        kept = symbol._recorder.kept
        key = symbol._node, name
        if key not in kept:
            kept[key] = make(symbol)
        return kept[key]

    return read


def _read(name: str) -> Callable[[Any], Any]:
    return lambda symbol: symbol._recorder.read(symbol, name)


def _constant(name: str) -> Callable[[Any], Any]:
    return lambda symbol: symbol._recorder.read_constant(symbol, name)


def _has_layers(symbol: Any) -> Callable[[], bool]:
    """Of the cache for the encoder's states, as long as nothing was added to it: that much the state tells."""
    source = symbol._node.args[0] if symbol._node.target is getattr else None
    known = source is not None and symbol._node.args[1] == "cross_attention_cache"
    if not known or any(user.target == "update" for user in symbol._node.users):
        raise CannotRecord("it branches on what a cache holds")
    return lambda: len(symbol._example) > 0


opaque_states[EncoderDecoderCache] = _state
opaque_reads[EncoderDecoderCache, "is_updated"] = _kept("is_updated", _Updated)
for _name in ("self_attention_cache", "cross_attention_cache"):
    opaque_reads[EncoderDecoderCache, _name] = _kept(_name, _read(_name))
for _name in ("is_sliding", "is_linear", "is_dummy", "is_compileable"):
    opaque_reads[Cache, _name] = _constant(_name)
opaque_reads[Cache, "__bool__"] = _has_layers
opaque_reads[Cache, "layers"] = _read("layers")


named_results[ModelOutput] = OUTPUT


class PackedConv1D(Replacement, PackedProduct, Conv1D):
    """GPT-2's linear layer, which holds its weight as [in, out]."""

    source: ClassVar[type[torch.nn.Module]] = Conv1D
    switch: ClassVar[str] = "weights_prepack"
    packs: ClassVar[bool] = True
    transposed: ClassVar[bool] = True

    @classmethod
    def why_not(cls, module: Conv1D, context: Context) -> str | None:
        if own_forward(module, Conv1D):
            return "it has a forward of its own"
        return product_problem(module)

    @classmethod
    def replace(cls, module: Conv1D, context: Context) -> str:
        module.out_features = module.nf
        return cls.pack(module, context)
