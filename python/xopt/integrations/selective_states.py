"""transformers' state spaces of Mamba's first kind (Falcon-Mamba, Jamba), whose states decay each by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from xopt.integrations.kernel_functions import call_step, fits, is_packed, tried_by
from xopt.modules.called import in_place_of_named
from xopt.modules.selective_scan import selective_scan
from xopt.modules.substitute import are_floats_on_cpu


def _scan_calls(random: Callable[..., torch.Tensor]) -> Iterator[Any]:
    for gate in (None, random(2, 3, 5)):
        args = random(2, 3, 5), random(2, 3, 5), -random(3, 4), random(2, 4, 5) - 0.5, random(2, 4, 5)
        options = {"delta_bias": random(3), "delta_softplus": True, "return_last_state": True}
        yield args, {"D": random(3), "z": gate, **options}


@in_place_of_named("mamba_selective_scan", switch="fuse_attention", fits=tried_by(_scan_calls))
def selective_scan_in_its_place(
    source: Callable[..., Any],
    hidden_states: Any,
    dt: Any,
    A: Any,  # noqa: N803 - as it is called
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any = None,  # noqa: N803
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    tensors = (hidden_states, dt, A, B, C, D, z, delta_bias, None)
    if is_packed(kwargs) or not fits(are_floats_on_cpu, tensors):
        options = {"delta_softplus": delta_softplus, "return_last_state": return_last_state}
        return source(hidden_states, dt, A, B, C, D, z, delta_bias, **options, **kwargs)
    hidden_states, dt, B, C = (each.transpose(1, 2) for each in (hidden_states, dt, B, C))  # noqa: N806
    z = None if z is None else z.transpose(1, 2)
    series = (hidden_states, dt, A, B, C, D, z, delta_bias, None)
    out, last = _scan(series, delta_softplus, _result_dtype(hidden_states, D, z))
    out = out.transpose(1, 2)
    return (out, last) if return_last_state else out


def _step_calls(random: Callable[..., torch.Tensor]) -> Iterator[Any]:
    for gate in (None, random(2, 3)):
        args = random(2, 3, 4), random(2, 3), random(2, 3), -random(3, 4), random(2, 4) - 0.5, random(2, 4)
        yield args, {"D": random(3), "z": gate, "dt_bias": random(3), "dt_softplus": True}


@in_place_of_named("mamba_selective_state_update", switch="fuse_attention", fits=tried_by(_step_calls))
def state_update_in_its_place(
    source: Callable[..., Any],
    state: Any,
    hidden_states: Any,
    dt: Any,
    A: Any,  # noqa: N803
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any = None,  # noqa: N803
    dt_bias: Any = None,
    dt_softplus: bool = False,
    z: Any = None,
    **kwargs: Any,
) -> Any:
    tensors = (hidden_states, dt, A, B, C, D, z, dt_bias, state)
    if kwargs or not fits(are_floats_on_cpu, tensors):
        return source(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **kwargs)
    rows = [None if each is None else each.unsqueeze(1) for each in (hidden_states, dt, B, C, z)]
    series = (rows[0], rows[1], A, rows[2], rows[3], D, rows[4], dt_bias, state)
    out, last = _scan(series, dt_softplus, hidden_states.dtype)
    state.copy_(last.to(state.dtype))
    return out.squeeze(1)


def _result_dtype(*tensors: Any) -> torch.dtype:
    dtypes = [each.dtype for each in tensors if each is not None]
    result: torch.dtype = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def _scan(series: tuple[Any, ...], softplus: bool, out_dtype: torch.dtype) -> tuple[Any, Any]:
    found = call_step(selective_scan, series, softplus=softplus, out_dtype=out_dtype)
    return found[0], found[1]
