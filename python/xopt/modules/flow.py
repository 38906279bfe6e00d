"""What a model that was optimized to another dtype computes in, and answers in, where somebody enters one of its blocks
himself: a method of the model's that is not its forward (`get_image_features`, `generate` of one with two halves).

Such a block runs as the whole does (`root.py`). Without autocast, tensors of two dtypes would meet inside, where a
forward asks for the dtype of a weight, and torch refuses most products of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from xopt.graph.autocast import autocast
from xopt.modules.containers import map_tensors


class Flow(NamedTuple):
    inside: torch.dtype
    source: torch.dtype

    def enter(self, run: Callable[..., Any], module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """The call of a block with autocast on, and results of the source's dtype."""
        with autocast(device_type(module, (*args, *kwargs.values())), self.inside):
            return run(module, self.restored(forward), args, kwargs, results=self.source)

    def restored(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A module's forward with results of the source's dtype."""

        def restored(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return map_tensors(self._restore, forward(module, *args, **kwargs))

        return restored

    def _restore(self, result: torch.Tensor) -> torch.Tensor:
        return result.to(self.source) if result.dtype == self.inside else result


def device_type(module: nn.Module, inputs: tuple[Any, ...]) -> str:
    """Of the first input that is a tensor; finding a parameter takes as long as ten of them."""
    for value in inputs:
        if isinstance(value, torch.Tensor):
            return "cpu" if value.is_cpu else value.device.type
    found = next(module.parameters(), None)
    return "cpu" if found is None else found.device.type
