"""transformers' state spaces: those of Mamba 2, whose states decay by one number a head, are linear attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from xopt.graph.symbol import Symbol
from xopt.integrations.kernel_functions import call_step, fits, is_packed, tried_by
from xopt.modules.called import in_place_of_named
from xopt.modules.linear_attention import can_scan, gated_linear_attention


def _chunk_calls(random: Callable[..., torch.Tensor]) -> Iterator[Any]:
    for state, limit in ((None, (0.0, math.inf)), (random(2, 4, 3, 6), (0.5, 1.0))):
        args = random(2, 5, 4, 3), random(2, 5, 4), -random(4), random(2, 5, 2, 6) - 0.5, random(2, 5, 2, 6), 4
        options = {"dt_bias": random(4), "dt_softplus": True, "dt_limit": limit, "initial_states": state}
        yield args, {"D": random(4), "return_final_states": True, **options}


@in_place_of_named("mamba2_chunk_scan", switch="fuse_attention", fits=tried_by(_chunk_calls))
def chunk_scan_in_its_place(
    source: Callable[..., Any],
    hidden_states: Any,
    dt: Any,
    A: Any,  # noqa: N803 - as it is called
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    chunk_size: int,
    D: Any = None,  # noqa: N803
    dt_bias: Any = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    options = {"dt_bias": dt_bias, "initial_states": initial_states, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    if is_packed(kwargs) or not fits(can_scan, (C, B, hidden_states, dt, initial_states), A, D, dt_bias):
        more = {"D": D, "return_final_states": return_final_states}
        return source(hidden_states, dt, A, B, C, chunk_size, **more, **options, **kwargs)
    dt = _step_sizes(dt, dt_bias, dt_softplus)
    if not dt_softplus or tuple(dt_limit) != (0.0, math.inf):
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    out, last = _scan((C, B, hidden_states, A.float() * dt.float(), dt, initial_states))
    if D is not None:
        out = out + D[..., None] * hidden_states.float()
    return (out, last) if return_final_states else out


def _step_calls(random: Callable[..., torch.Tensor]) -> Iterator[Any]:
    sizes = {"dt": random(2, 4, 1), "A": -random(4, 1, 1), "D": random(4, 1), "dt_bias": random(4, 1)}
    shapes = {"dt": (2, 4, 3), "A": (4, 3, 6), "D": (4, 3), "dt_bias": (4, 3)}
    for gate in (None, random(2, 4, 3)):
        args = random(2, 4, 3, 6), random(2, 4, 3)
        spread = {name: value.expand(shapes[name]) for name, value in sizes.items()}
        yield args, {**spread, "B": random(2, 2, 6), "C": random(2, 2, 6) - 0.5, "dt_softplus": True, "z": gate}


@in_place_of_named("mamba2_selective_state_update", switch="fuse_attention", fits=tried_by(_step_calls))
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
    rows = [each.unsqueeze(1) for each in (C, B, hidden_states)]
    spread = _is_spread(dt, 1) and _is_spread(A, 2) and _is_spread(dt_bias, 1)
    if not spread or not fits(can_scan, (*rows, dt, state), A, D, dt_bias, z):
        return source(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **kwargs)
    dt = _step_sizes(dt[..., 0], None if dt_bias is None else dt_bias[..., 0], dt_softplus)
    decay = dt.float() * A[:, 0, 0].float()
    out, last = _scan((*rows, decay.unsqueeze(1), dt.unsqueeze(1), state))
    state.copy_(last.to(state.dtype))
    out = out.squeeze(1)
    if D is not None:
        out = out + hidden_states * D
    if z is not None:
        out = out * functional.silu(z)
    return out.to(hidden_states.dtype)


def _is_spread(x: Any, dims: int) -> bool:
    """Whether a tensor has but one value along its last dimensions, as `expand` makes it."""
    if x is None:
        return True
    x = x._example if type(x) is Symbol else x
    return all(x.stride(-1 - dim) == 0 or x.shape[-1 - dim] == 1 for dim in range(dims))


def _step_sizes(dt: Any, bias: Any, softplus: bool) -> Any:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt


def _scan(tensors: tuple[Any, ...]) -> tuple[Any, Any]:
    """States lie as [batch, heads, value depth, depth]."""
    options: dict[str, Any] = {"scale": 1.0, "corrects": False, "state_by_columns": True}
    found = call_step(gated_linear_attention, tensors, out_dtype=torch.float32, **options)
    return found[0], found[1]
