"""Operands of recurrent networks: torch's layers of the recorded sizes, and their weights as xopt packs them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

import xopt

_LAYERS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
_SEED = 7


def fill_recurrent(made: dict[str, Any], named: dict[str, Any], dtype: torch.dtype) -> None:
    """Puts the packed weights of `layers_of` of this dtype in the place of what was made, and lengths that
    there can be."""
    features = made["input"].shape[-1]
    key = tuple(sorted((name, value) for name, value in named.items() if isinstance(value, (bool, int, str))))
    made["weights"] = [held.clone() for held in _packed_weights(key, features, dtype)]
    assert [list(held.shape) for held in made["weights"]] == [each["shape"] for each in named["weights"]]
    if made.get("batch_sizes") is not None:
        made["batch_sizes"] = lengths(made["batch_sizes"].numel(), made["hidden"].shape[1], made["input"].shape[0])


@functools.lru_cache(maxsize=1)
def _packed_weights(key: tuple[tuple[str, Any], ...], features: int, dtype: torch.dtype) -> list[torch.Tensor]:
    packed: Any = xopt.optimize(layers_of(dict(key), features), dtype=dtype)
    parameters = [packed._parameters[name] for name in packed._flat_weights_names]
    return [each.place.packed if hasattr(each, "place") else each.detach() for each in parameters]


def layers_of(named: dict[str, Any], features: int) -> nn.RNNBase:
    """Torch's own in fp32, the same each time."""
    cell = str(named["cell"])
    options: Any = {"nonlinearity": cell.removeprefix("rnn_")} if cell.startswith("rnn_") else {}
    if cell == "lstm":
        options["proj_size"] = int(named.get("proj_size") or 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        made: nn.RNNBase = _LAYERS[cell](
            features,
            int(named["hidden_size"]),
            int(named.get("num_layers") or 1),
            bias=bool(named.get("bias", True)),
            batch_first=bool(named.get("batch_first")),
            bidirectional=bool(named.get("bidirectional")),
            **options,
        )
    return made.eval()


def lengths(steps: int, batch: int, rows: int) -> torch.Tensor:
    """Of packed sequences, how many go on at each step: the first has all steps, the others share the rest."""
    of_each = [steps]
    for left in range(batch - 1, 0, -1):
        of_each.append((rows - sum(of_each)) // left)
    return torch.tensor([sum(length > step for length in of_each) for step in range(steps)])
