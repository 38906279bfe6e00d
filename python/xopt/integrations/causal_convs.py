"""transformers' short convolutions of hybrids and state spaces, over a whole text and step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from xopt.integrations.kernel_functions import call_step, fits, is_packed, tried_by
from xopt.modules.called import in_place_of_named
from xopt.modules.causal_conv import causal_conv
from xopt.modules.substitute import are_floats_on_cpu

_SILU = ("silu", "swish")


def _text_calls(random: Callable[..., torch.Tensor]) -> Iterator[Any]:
    for bias, activation in ((None, None), (random(3), "silu"), (random(3), "swish")):
        yield (random(2, 3, 5) - 0.5, random(3, 4)), {"bias": bias, "activation": activation}


@in_place_of_named("causal_conv1d_fn", switch="conv_prepack", fits=tried_by(_text_calls))
def causal_conv_in_its_place(
    source: Callable[..., Any],
    hidden_states: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Any:
    tensors = (hidden_states, weight, bias)
    if is_packed(kwargs) or not _is_known(activation) or not fits(_can_convolve, tensors):
        return source(hidden_states, weight, bias=bias, activation=activation, **kwargs)
    return _convolved((*tensors, None), activation)[0].transpose(1, 2)


def _step_calls(random: Callable[..., torch.Tensor]) -> Iterator[Any]:
    for kept, steps, activation in ((4, 1, "silu"), (3, 2, None), (6, 7, "swish")):
        args = random(2, 3, steps) - 0.5, random(2, 3, kept), random(3, 4), random(3)
        yield args, {"activation": activation}


@in_place_of_named("causal_conv1d_update", switch="conv_prepack", fits=tried_by(_step_calls))
def causal_conv_step_in_its_place(
    source: Callable[..., Any],
    hidden_states: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
) -> Any:
    tensors = (hidden_states, weight, bias, conv_state)
    if not _is_known(activation) or not fits(_can_convolve, tensors):
        return source(hidden_states, conv_state, weight, bias, activation)
    out, last = _convolved(tensors, activation)
    conv_state.copy_(last)
    return out.transpose(1, 2)


def _is_known(activation: Any) -> bool:
    return activation is None or activation in _SILU


def _can_convolve(hidden: Any, weight: Any, bias: Any, state: Any = None) -> bool:
    if not are_floats_on_cpu(hidden, weight, bias, state) or hidden.ndim != 3 or weight.ndim != 2:
        return False
    return state is None or (state.ndim == 3 and state.shape[-1] >= weight.shape[-1] - 1)


def _convolved(tensors: tuple[Any, ...], activation: str | None) -> tuple[Any, Any]:
    """Of [batch, channels, steps], as [batch, steps, channels]."""
    found = call_step(causal_conv, (tensors[0].transpose(1, 2), *tensors[1:]), silu=activation is not None)
    return found[0], found[1]
