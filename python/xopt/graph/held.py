"""Tensors that modules hold without having registered them: as attributes, or in containers that attributes are (a
table of biases that is filled when it is first asked for).

A recording may read them. That they are the same in each call, and no others, is what a program's guard looks at
(`watch.py`); what is in them is read anew each time.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from xopt.graph.constants import values_in

_REGISTERED = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, list, set, deque, OrderedDict)
_DEEPEST = 6


class Held:
    def __init__(self, root: nn.Module) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        for module in root.modules():
            for name, value in module.__dict__.items():
                if name not in _REGISTERED:
                    found = (tensor for tensor in tensors_in(value) if type(tensor) is torch.Tensor)
                    self._tensors.update((id(tensor), tensor) for tensor in found)
        self._memory = {_memory_of(tensor) for tensor in self._tensors.values()}
        self._nodes: dict[int, Node] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._tensors and not tensor.requires_grad

    def share_memory(self, values: Iterable[Any]) -> bool:
        """Whether to write to one of these would be to write to what a module holds."""
        return bool(self._memory) and any(
            type(value) is torch.Tensor and _memory_of(value) in self._memory for value in values_in(list(values))
        )

    def node(self, graph: Graph, tensor: torch.Tensor) -> Node:
        """The step that reads it."""
        if id(tensor) not in self._nodes:
            with graph.inserting_before(next(iter(graph.nodes), None)):
                held: Any = weakref.ref(tensor)
                self._nodes[id(tensor)] = graph.call_function(read_held, (held,))
        return self._nodes[id(tensor)]

    def clear(self) -> None:
        self._tensors.clear()
        self._nodes.clear()


def read_held(held: weakref.ref[torch.Tensor]) -> torch.Tensor:
    tensor = held()
    assert tensor is not None, "the guard looks at all that the module holds before a program runs"
    return tensor


def tensors_in(value: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """Those in containers, and in containers in these; not without end, since some may hold themselves."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and (type(value) is tuple or type(value) in _CONTAINERS):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each, depth - 1)


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
