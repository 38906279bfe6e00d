"""Parameters that something else was computed from, which has to be computed again once they are written to.

Torch counts what is written to a tensor, except through its `data`, by which moving averages of a model's weights are
commonly put in place. This class counts that as well, and is torch's own in all else.

There is none for buffers: torch's compiler refuses tensors that are neither plain nor parameters. What is written
through a buffer's `data` is seen when something else of the model changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from xopt.graph.signature import TENSORS


class CountedParameter(nn.Parameter):
    """Pickled, it is a plain parameter again: `nn.Parameter` sees to that."""

    @property
    def data(self) -> torch.Tensor:
        """The same memory, whose changes are counted with this one's."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))


TENSORS.add(CountedParameter)

asking_quickly = torch._C.DisableTorchFunctionSubclass
"""To ask many for their versions: whoever is of another class than torch's own, torch asks for its `__torch_function__`
first each time, which takes three times as long as the rest."""


def count_changes(*tensors: torch.Tensor | None) -> None:
    """All that is written to those that are parameters from now on changes their `_version`, but for what comes through
    `numpy`, and through what somebody has as their `data`, or as that of a view of them, from before."""
    for tensor in tensors:
        if type(tensor) is nn.Parameter and not tensor.is_inference():  # of which torch counts nothing
            tensor.__class__ = CountedParameter
