"""What a forward computes from its module's parameters alone: computed once, and again when one of the parameters has
changed. Swin looks biases of relative positions up in a table, DeBERTa's layers multiply embeddings of such positions,
DETR's those of its queries.

Only little of it: what is kept is memory beside the weights.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from xopt.graph.late import EFFECT
from xopt.graph.program import generate
from xopt.graph.record import EXAMPLE
from xopt.graph.signature import TENSORS
from xopt.graph.steps import KIND, Described
from xopt.modules.counted_parameter import asking_quickly, count_changes
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.pattern import (
    Pattern,
    is_call,
    is_cast,
    leaves,
    put_in_place,
    readers,
    reads_parameters,
    seen_in_views,
)
from xopt.modules.told_sizes import is_told_size

_PARTS = 25  # of a program's weights, of which one may be kept


class ComputeOnce(Pattern):
    stage: ClassVar[int] = 7  # what is left when all operators are found
    switch: ClassVar[str] = "weights_prepack"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        room = sum(map(_bytes_of, graph.find_nodes(op="get_attr"))) // _PARTS
        kept = _that_fit(_of_weights(graph), room)
        for node in [each for each in graph.nodes if each in kept]:
            _put(graph, node)


def _that_fit(of_weights: dict[Node, None], room: int) -> set[Node]:
    """Of results that others want as many as there is room for. In place of one that is too large, what it is made
    of."""
    kept = set[Node]()
    waiting = [node for node in of_weights if any(reader not in of_weights for reader in readers(node))]
    while waiting:
        node = min(waiting, key=_bytes_of)
        waiting.remove(node)
        if not isinstance(node.meta.get(EXAMPLE), Described) or not _computes(node) or leaves(node):
            continue
        if _bytes_of(node) <= room:
            kept.add(node)
            room -= _bytes_of(node)
        else:
            waiting += [each for each in node.all_input_nodes if each in of_weights and each not in {*waiting, *kept}]
    return kept


def _of_weights(graph: Graph) -> dict[Node, None]:
    """The tensors that parameters and buffers are, or that are made of these alone, their sizes, and the modules that
    hold parameters."""
    found: dict[Node, None] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if EFFECT in node.meta or not all(source in found for source in sources):
            continue
        of_modules = any(map(_is_module, sources))
        if node.op == "get_attr":
            is_known = _is_module(node) or node.meta.get(KIND) in (*TENSORS, PackedParameter)
        elif of_modules or not isinstance(node.meta.get(EXAMPLE), Described):
            is_known = bool(sources) and (is_told_size(node) or reads_parameters(node))
        else:
            is_known = bool(sources)
        if is_known:
            found[node] = None
    return found


def _is_module(node: Node) -> bool:
    return node.op == "get_attr" and isinstance(node.meta.get(EXAMPLE), nn.Module)


def _computes(node: Node) -> bool:
    """Whether there is more to it than a view of a parameter, or a copy in another dtype, which may be as large."""
    source: Any = node
    while _is_part(source) or is_cast(source) or seen_in_views(source) is not source:
        source = source.args[0] if _is_part(source) or is_cast(source) else seen_in_views(source)
    return bool(source.op != "get_attr")


def _is_part(node: Node) -> bool:
    """Whether it is taken out of another by numbers, not looked up by a tensor."""
    return is_call(node, operator.getitem) and len(node.all_input_nodes) == 1


def _bytes_of(node: Node) -> int:
    example = node.meta.get(EXAMPLE)
    if isinstance(example, nn.Module):
        return sum(tensor.nbytes for tensor in example.parameters())
    return math.prod(example.shape) * example.dtype.itemsize if isinstance(example, Described) else 0


def _put(graph: Graph, node: Node) -> None:
    steps, waiting = {node}, [node]
    while waiting:
        more = {each for each in waiting.pop().all_input_nodes if each.op != "get_attr"} - steps
        steps |= more
        waiting += more
    sources = list(dict.fromkeys(each for step in steps for each in step.all_input_nodes if each.op == "get_attr"))
    inside = Graph()
    copies = {source: inside.placeholder(f"source_{place}") for place, source in enumerate(sources)}
    for step in graph.nodes:
        if step in steps:
            copies[step] = inside.node_copy(step, copies.__getitem__)
    inside.output(copies[node])
    # First of all, where it stands in no chain's way.
    first = next(each for each in graph.nodes if each.op not in ("placeholder", "get_attr"))
    for source in sources:
        first.prepend(source)
    with graph.inserting_before(first):
        new = graph.call_function(ComputedOnce(inside), tuple(sources))
    put_in_place(graph, node, new)


Source = Tensor | nn.Module


class ComputedOnce:
    """A step of a program, of the parameters, buffers and modules that it is given."""

    __name__ = "computed_once"

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._function: Callable[..., Tensor] = generate(graph, {})
        self._kept: _Kept | None = None

    def __call__(self, *sources: Source) -> Tensor:
        with asking_quickly():
            if self._kept is not None and self._kept.holds(sources):
                return self._kept.result
        with torch.inference_mode(False), torch.no_grad():
            result = self._function(None, *sources)
        self._kept = _Kept.of(result, sources)
        return result


class _Stored(NamedTuple):
    """A tensor that something was computed from: where it is, and how it was."""

    holder: weakref.ref[Source]
    """The tensor itself, or the module that has it."""
    name: str
    memory: weakref.ref[Tensor] | None
    state: tuple[int, int]

    def holds(self) -> bool:
        found = _stored_in(self.holder(), self.name)
        if found is None or self.memory is None:
            return found is None and self.memory is None
        memory = _memory_of(found)
        return self.memory() is memory and _state_of(memory) == self.state


class _Kept(NamedTuple):
    result: Tensor
    sources: list[weakref.ref[Source]]
    stored: list[_Stored]

    @classmethod
    def of(cls, result: Tensor, sources: tuple[Source, ...]) -> _Kept | None:
        """None: nobody counts what is written to one of them."""
        stored = []
        for holder, name in (each for source in sources for each in _tensors_of(source)):
            tensor = _stored_in(holder, name)
            memory = None if tensor is None else _memory_of(tensor)
            if memory is not None and memory.is_inference():
                return None
            count_changes(memory)
            state = (0, 0) if memory is None else _state_of(memory)
            stored.append(_Stored(weakref.ref(holder), name, None if memory is None else weakref.ref(memory), state))
        return cls(result, [weakref.ref(source) for source in sources], stored)

    def holds(self, sources: tuple[Source, ...]) -> bool:
        for source, then in zip(sources, self.sources, strict=True):
            if then() is not source:
                return False
        return all(each.holds() for each in self.stored)


def _tensors_of(source: Source) -> Iterator[tuple[Source, str]]:
    """Where they are, and their names there."""
    if isinstance(source, Tensor):
        yield source, ""
        return
    for module in source.modules():
        for name in (*module._parameters, *module._buffers):
            yield module, name


def _stored_in(holder: Source | None, name: str) -> Tensor | None:
    if holder is None or isinstance(holder, Tensor):
        return holder
    parameters = holder._parameters
    return parameters[name] if name in parameters else holder._buffers.get(name)


def _memory_of(tensor: Tensor) -> Tensor:
    """What tells of changes: of a packed parameter that which it lies in."""
    return tensor.place.packed if type(tensor) is PackedParameter else tensor


def _state_of(memory: Tensor) -> tuple[int, int]:
    """Differs once somebody has written to it, or put other memory into it."""
    return memory._version, memory.data_ptr()
