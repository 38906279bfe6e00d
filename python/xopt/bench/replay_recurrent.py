"""Who replays a recurrent network: torch's own layers, with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from xopt.bench.recurrent_operands import layers_of
from xopt.bench.replay_contender import Contender
from xopt.bench.replay_operands import Named, dtype_of


def recurrent_contenders(kernel: dict[str, Any], make: Callable[[], Named], all_instances: bool) -> list[Contender]:
    if kernel["operator"] != "xopt::recurrent":
        return []

    def operands() -> tuple[Any, ...]:
        named, dtype = make(), dtype_of(kernel["dtype"])
        layers = layers_of(named, named["input"].shape[-1]).to(dtype)
        values: Any = named["input"].to(dtype)
        if named.get("batch_sizes") is not None:
            values = PackedSequence(values, named["batch_sizes"])
        states = [named[name].to(dtype) for name in ("hidden", "cell_state") if named.get(name) is not None]
        if len(states) < 2:
            return layers, values, states[0] if states and named["cell"] != "lstm" else None
        return layers, values, tuple(states)

    return [Contender("torch", operands, _run)]


def _run(operands: tuple[Any, ...]) -> torch.Tensor:
    layers, values, states = operands
    out = layers(values, states)[0]
    return out.data if isinstance(out, PackedSequence) else out
