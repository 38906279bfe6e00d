"""transformers' gated delta rule (Qwen3-Next and 3.5, OLMo Hybrid) and Kimi's, whose decays are one a row of the state.

Each model's file has two functions for it, one of chunks for prompts and one step by step, under names that stand for
the kernels of a library. What they compute is tried before they are taken for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from xopt.graph.symbol import is_symbolic, recorder_of
from xopt.modules.called import in_place_of_named
from xopt.modules.delta_rule import can_correct, correct_with_torch, gated_delta_rule
from xopt.modules.gradients import is_transformed

_NAMES = (
    *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    *("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)
_UNIT_EPS = 1e-6


def _is_the_rule(function: Any) -> bool:
    """Whether a function of one of these names is transformers' own, and computes what it is taken for."""
    source = inspect.unwrap(function)
    if not (getattr(source, "__module__", None) or "").startswith("transformers.models."):
        return False
    return _computes_it(source)


@functools.cache
def _computes_it(source: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    by_row = "kimi" in source.__name__

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)

    query, key, value = random(2, 5, 2, 6) - 0.5, random(2, 5, 2, 6), random(2, 5, 2, 3)
    decay, rate, state = -random(*((2, 5, 2, 6) if by_row else (2, 5, 2))), random(2, 5, 2), random(2, 2, 6, 3)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for unit in (False, True):
                options = {"output_final_state": True, "use_qk_l2norm_in_kernel": unit}
                found = source(query, key, value, g=decay, beta=rate, initial_state=state, **options)
                expected = correct_with_torch(
                    query, key, value, decay, rate, state, unit_eps=_UNIT_EPS if unit else None
                )
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    except Exception:  # it takes other arguments, or computes another thing
        return False
    return True


@in_place_of_named(*_NAMES, switch="fuse_attention", fits=_is_the_rule)
def gated_delta_rule_in_its_place(
    source: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    g: Any = None,
    beta: Any = None,
    *others: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Any:
    options = {"initial_state": initial_state, "output_final_state": output_final_state}
    options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
    tensors = (query, key, value, g, beta, initial_state)
    packed = any(kwargs.get(name) is not None for name in ("cu_seqlens", "seq_idx"))
    symbolic = is_symbolic(tensors, {})
    if others or packed or not (symbolic or (can_correct(*tensors) and not is_transformed())):
        return source(query, key, value, g, beta, *others, **options, **kwargs)
    unit_eps = _UNIT_EPS if use_qk_l2norm_in_kernel else None
    if symbolic:
        found = recorder_of(query).call(gated_delta_rule, *tensors, unit_eps=unit_eps)
    else:
        found = gated_delta_rule(*tensors, unit_eps=unit_eps)
    return found[0], found[1] if output_final_state else None
