"""What a forward computes from its module's parameters and from sizes alone: computed once for the same sizes, and
again when one of the parameters has changed. Swin looks biases of relative positions up in a table, DeBERTa's layers
multiply embeddings of such positions, DETR's those of its queries; language models make a mask, and the angles of a
rotation, of how many tokens there are.

Only little of it: what is kept is memory beside the weights.
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from xopt.graph.fresh import is_written_to
from xopt.graph.late import EFFECT
from xopt.graph.program import generate
from xopt.graph.record import EXAMPLE
from xopt.graph.signature import TENSORS
from xopt.graph.steps import KIND, Described
from xopt.modules.counted_parameter import asking_quickly, count_changes
from xopt.modules.early_sizes import early_number
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.pattern import (
    Pattern,
    is_call,
    is_cast,
    is_view,
    leaves,
    put_in_place,
    readers,
    reads_parameters,
    seen_in_views,
)
from xopt.modules.told_sizes import is_told_size

_PARTS = 25  # of a program's weights, of which one may be kept
_MOST_SIZES = 4  # for which one result is kept


class ComputeOnce(Pattern):
    stage: ClassVar[int] = 7  # what is left when all operators are found
    switch: ClassVar[str] = "weights_prepack"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        room = sum(map(_bytes_of, graph.find_nodes(op="get_attr"))) // _PARTS
        known = _known(graph)
        kept = _that_fit(known, room)
        together = max(1, sum(map(_bytes_of, kept)))
        for node in [each for each in reversed(graph.nodes) if each in kept]:  # before what they are made of
            _put(graph, node, known, room * _bytes_of(node) // together)


def _that_fit(known: dict[Node, bool], room: int) -> set[Node]:
    """Of results that others want as many as there is room for. In place of one that is too large, what it is made
    of."""
    kept = set[Node]()
    wanted = (node for node in known if any(reader not in known for reader in readers(node)))
    waiting = list(dict.fromkeys(_seen_in_several(node) for node in wanted))
    while waiting:
        node = min(waiting, key=_bytes_of)
        waiting.remove(node)
        if not _can_be_kept(node):
            continue
        if _bytes_of(node) <= room:
            kept.add(node)
            room -= _bytes_of(node)
        else:
            waiting += [each for each in node.all_input_nodes if each in known and each not in {*waiting, *kept}]
    return kept


def _seen_in_several(node: Node) -> Node:
    """What several views, of which each layer makes its own, are views of: that is kept once."""
    while is_view(node) and _can_be_kept(node.all_input_nodes[0]) and len(readers(node.all_input_nodes[0])) > 1:
        node = node.all_input_nodes[0]
    return node


def _can_be_kept(node: Node) -> bool:
    if not isinstance(node.meta.get(EXAMPLE), Described) or not _computes(node):
        return False
    return not leaves(node) and not is_written_to(node)


def _known(graph: Graph) -> dict[Node, bool]:
    """The tensors that parameters and buffers are, or that are made of these and of sizes alone, such sizes, and the
    modules that hold parameters. Of each, whether it is a number that depends on what the forward is given."""
    found: dict[Node, bool] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if EFFECT in node.meta or node.op in ("placeholder", "output"):
            continue
        are_known = all(source in found for source in sources)
        if node.op == "get_attr":
            is_known = _is_module(node) or node.meta.get(KIND) in (*TENSORS, PackedParameter)
        elif is_told_size(node):
            found[node] = not are_known or any(map(found.get, sources))
            continue
        elif any(map(_is_module, sources)) or not _is_of_tensors(node.meta.get(EXAMPLE)):
            is_known = are_known and reads_parameters(node)
        else:
            is_known = are_known
        if is_known and (sources or node.op == "get_attr"):
            found[node] = False
    return found


def _is_of_tensors(example: Any) -> bool:
    """Whether a step gives a tensor, or several."""
    if isinstance(example, Described):
        return True
    return type(example) in (tuple, list) and all(isinstance(each, Tensor) for each in example)


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


def _put(graph: Graph, node: Node, known: dict[Node, bool], room: int) -> None:
    steps, waiting = {node}, [node]
    while waiting:
        more = {each for each in waiting.pop().all_input_nodes if each.op != "get_attr" and not known[each]} - steps
        steps |= more
        waiting += more
    given = list(dict.fromkeys(each for step in steps for each in step.all_input_nodes if each not in steps))
    sources = [each for each in given if each.op == "get_attr"]
    numbers = [each for each in given if each.op != "get_attr"]
    inside = Graph()
    copies = {each: inside.placeholder(f"given_{place}") for place, each in enumerate([*sources, *numbers])}
    for step in graph.nodes:
        if step in steps:
            copies[step] = inside.node_copy(step, copies.__getitem__)
    inside.output(copies[node])
    # First of all, where it stands in no chain's way, if its numbers are known there.
    first = next(each for each in graph.nodes if each.op not in ("placeholder", "get_attr"))
    for source in sources:
        first.prepend(source)
    place = first
    early: list[Any] = [early_number(each, first) for each in numbers]
    if None in early:
        place, early = node, numbers
    with graph.inserting_before(place):
        new = graph.call_function(ComputedOnce(inside, len(sources), room), (*sources, *early))
    put_in_place(graph, node, new)


Source = Tensor | nn.Module


class ComputedOnce:
    """A step of a program, of the parameters, buffers and modules that it is given, and then of numbers."""

    __name__ = "computed_once"

    def __init__(self, graph: Graph, sources: int, room: int) -> None:
        self.graph = graph
        self._function: Callable[..., Tensor] = generate(graph, {})
        self._sources = sources
        self._room = room
        self._kept: dict[tuple[int, ...], _Kept] = {}
        self._lock = threading.Lock()

    def __call__(self, *given: Any) -> Tensor:
        sources, numbers = given[: self._sources], given[self._sources :]
        known = self._kept.get(numbers)
        if known is not None:
            with asking_quickly():
                if known.holds(sources):
                    return known.result
        with torch.inference_mode(False), torch.no_grad():
            result = self._function(None, *given)
        self._keep(numbers, result, sources)
        return result

    def _keep(self, numbers: tuple[int, ...], result: Tensor, sources: tuple[Source, ...]) -> None:
        """In place of what was kept first, where it would be too much."""
        made = _Kept.of(result, sources)
        with self._lock:
            kept = self._kept
            kept.pop(numbers, None)
            if made is None or (numbers and made.nbytes() > self._room):
                return
            kept[numbers] = made
            while len(kept) > _MOST_SIZES or (len(kept) > 1 and sum(map(_Kept.nbytes, kept.values())) > self._room):
                kept.pop(next(iter(kept)))


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

    def nbytes(self) -> int:
        return self.result.untyped_storage().nbytes()

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
