"""What a forward computes from its module's parameters alone, as Swin looks biases of relative positions up in a table:
computed once, and again when one of the parameters has changed.

Only little of it: what is kept is memory beside the weights.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from xopt.graph.fresh import is_fresh
from xopt.graph.late import EFFECT
from xopt.graph.program import generate
from xopt.graph.record import EXAMPLE
from xopt.graph.signature import TENSORS
from xopt.graph.steps import KIND, Described
from xopt.modules.counted_parameter import asking_quickly, count_changes
from xopt.modules.pattern import Pattern, is_call, is_cast, put_in_place, readers, seen_in_views

_ENLARGING = ("expand", "expand_as", "broadcast_to", torch.broadcast_to)
_PARTS = 50  # of a program's weights, of which one may be kept


class ComputeOnce(Pattern):
    stage: ClassVar[int] = 7  # what is left when all operators are found
    switch: ClassVar[str] = "weights_prepack"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        room = sum(map(_bytes_of, graph.find_nodes(op="get_attr"))) // _PARTS
        of_weights = _of_weights(graph)
        for node in list(of_weights):
            is_last = any(reader not in of_weights for reader in readers(node))
            if not is_last or not _computes(node) or _leaves(node) or _bytes_of(node) > room:
                continue
            room -= _bytes_of(node)
            _put(graph, node)


def _of_weights(graph: Graph) -> dict[Node, None]:
    """The tensors that parameters and buffers are, or that are made of these alone. Not of packed ones: nobody counts
    what is written to those."""
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if not isinstance(node.meta.get(EXAMPLE), Described) or EFFECT in node.meta:
            continue
        sources = node.all_input_nodes
        is_stored = node.op == "get_attr" and node.meta.get(KIND) in TENSORS
        if is_stored or (sources and all(source in found for source in sources)):
            found[node] = None
    return found


def _computes(node: Node) -> bool:
    """Whether there is more to it than a view of a parameter, or a copy in another dtype, which may be as large."""
    source: Any = node
    while _is_part(source) or is_cast(source) or seen_in_views(source) is not source:
        source = source.args[0] if _is_part(source) or is_cast(source) else seen_in_views(source)
    return bool(source.op != "get_attr")


def _is_part(node: Node) -> bool:
    """Whether it is taken out of another by numbers, not looked up by a tensor."""
    return is_call(node, operator.getitem) and len(node.all_input_nodes) == 1


def _leaves(node: Node) -> bool:
    """Whether the forward may return it, or hand it to somebody who keeps it."""
    return any(
        user.op == "output" or EFFECT in user.meta or (_may_be_view(user, node) and _leaves(user))
        for user in node.users
    )


def _may_be_view(user: Node, node: Node) -> bool:
    known, of = user.meta.get(EXAMPLE), node.meta.get(EXAMPLE)
    if is_fresh(user.target) or not isinstance(known, Described) or not isinstance(of, Described):
        return not is_fresh(user.target)
    larger = math.prod(known.shape) > math.prod(of.shape) and not is_call(user, *_ENLARGING)
    return known.dtype == of.dtype and not larger


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


class ComputedOnce:
    """A step of a program, of the parameters and buffers that it is given."""

    __name__ = "computed_once"

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._function: Callable[..., Tensor] = generate(graph, {})
        self._kept: _Kept | None = None

    def __call__(self, *sources: Tensor) -> Tensor:
        with asking_quickly():
            kept = self._kept
            if kept is not None and kept.holds(sources):
                return kept.result
            with torch.inference_mode(False), torch.no_grad():
                result = self._function(None, *sources)
            count_changes(*sources)
            is_counted = not any(source.is_inference() for source in sources)
            self._kept = (
                _Kept(result, [(weakref.ref(each), *_state_of(each)) for each in sources]) if is_counted else None
            )
        return result


class _Kept(NamedTuple):
    result: Tensor
    states: list[tuple[weakref.ref[Tensor], int, int]]

    def holds(self, sources: tuple[Tensor, ...]) -> bool:
        for source, (then, version, place) in zip(sources, self.states, strict=True):
            if then() is not source or _state_of(source) != (version, place):
                return False
        return True


def _state_of(source: Tensor) -> tuple[int, int]:
    """Differs once somebody has written to it, or put other memory into it."""
    return source._version, source.data_ptr()
