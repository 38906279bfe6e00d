"""transformers' gated delta rule (Qwen3-Next and 3.5, OLMo Hybrid) and Kimi's, whose decays are one a row of the state:
of each a function of chunks for prompts, and one step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from xopt.integrations.kernel_functions import call_step, fits, is_packed, tried_by
from xopt.modules.called import in_place_of_named
from xopt.modules.linear_attention import can_scan, gated_linear_attention

_RULE = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_BY_ROW = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
_UNIT_EPS = 1e-6


def _calls(random: Callable[..., torch.Tensor], *row: int) -> Iterator[Any]:
    for unit in (False, True):
        rows = random(2, 5, 2, 6) - 0.5, random(2, 5, 2, 6), random(2, 5, 2, 3)
        numbers = {"g": -random(2, 5, 2, *row), "beta": random(2, 5, 2), "initial_state": random(2, 2, 6, 3)}
        yield rows, {**numbers, "output_final_state": True, "use_qk_l2norm_in_kernel": unit}


def _calls_by_row(random: Callable[..., torch.Tensor]) -> Iterator[Any]:
    return _calls(random, 6)


@in_place_of_named(*_RULE, switch="fuse_attention", fits=tried_by(_calls))
@in_place_of_named(*_BY_ROW, switch="fuse_attention", fits=tried_by(_calls_by_row))
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
    if others or is_packed(kwargs) or not fits(can_scan, tensors):
        return source(query, key, value, g, beta, *others, **options, **kwargs)
    unit_eps = _UNIT_EPS if use_qk_l2norm_in_kernel else None
    found = call_step(gated_linear_attention, tensors, unit_eps=unit_eps)
    return found[0], found[1] if output_final_state else None
