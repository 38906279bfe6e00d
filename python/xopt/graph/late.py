"""Moves what has to do with objects that are no tensors to where it stands in nobody's way: what is asked of a call to
the beginning of a recorded graph, and what is done to objects to its end.

What is between can be computed together, a call that turns out not to be of the recorded kind has computed nothing, and
one that raises has changed nothing. Whoever puts something off has to answer in its place until then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from xopt.graph.autocast import CASTS
from xopt.graph.fresh import memory_of
from xopt.graph.parts import name_of

EFFECT = "effect"  # in the meta of a node that has to stay even where nobody uses its result


reads_objects: set[Any] = {getattr}
"""Functions that tell what an object holds."""


def set_at_the_end(graph: Graph, settings: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    """Sets attributes of objects, by `setattr` or otherwise. Steps that are wanted for nothing else are moved there as
    well, unless an object has been changed before that."""
    late: dict[Node, None] = {}
    for function, args in settings:
        node = graph.call_function(function, args)
        node.meta[EFFECT] = True
        late[node] = None
    if not late or any(EFFECT in node.meta and node not in late for node in graph.nodes):
        return
    first = next(iter(late))
    for node in reversed(list(graph.nodes)):
        if node.users and node not in late and all(user in late for user in node.users) and _can_wait(node):
            first.prepend(node)
            first = node
            late[node] = None


def _can_wait(node: Node) -> bool:
    """Whether it computes something: what objects hold may be something else by then."""
    return node.op in ("call_function", "call_method") and EFFECT not in node.meta and node.target not in reads_objects


def hand_over_what_is_left(graph: Graph) -> None:
    """Of a whole graph: copies of what nobody else wants into tensors that objects hold become `hand_over`."""
    for node in graph.nodes:
        if node.target is Tensor.copy_ and EFFECT in node.meta and _is_left_to(node, node.args[1]):
            node.target = hand_over


_MAY_GIVE_THE_SAME = frozenset({*CASTS, "type_as", "half", "bfloat16", "contiguous", "expand", "expand_as"})


def _is_left_to(user: Node, value: Any) -> bool:
    """Whether a step has made something that nobody else has."""
    while isinstance(value, Node) and list(value.users) == [user]:
        if name_of(value.target) not in _MAY_GIVE_THE_SAME:
            return memory_of(value) is not None
        user, value = value, value.args[0]
    return False


def hand_over(held: Tensor, value: Tensor) -> None:
    """`held.copy_(value)` of a value that nobody else has. Where nobody sees the memory of either but they, the value's
    becomes that of the other: a state of some megabytes is not copied at each step. Not on devices, where a captured
    graph may know the address."""
    lie_alike = held.shape == value.shape and held.stride() == value.stride() and held.is_cpu and value.is_cpu
    if lie_alike and held.dtype == value.dtype and _has_own_memory(held) and _has_own_memory(value):
        held.set_(value)  # type: ignore[call-overload]
    else:
        held.copy_(value)


def _has_own_memory(tensor: Tensor) -> bool:
    """All of it, and nobody else a part."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.numel() * tensor.element_size() and _owners(tensor) == _ONE_OWNER


def _owners(tensor: Tensor) -> int | None:
    """Of its memory. Torch counts them by a function of its own; None: this torch has none."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(tensor.untyped_storage()._cdata)


_LONE = torch.empty(1)
_ONE_OWNER = _owners(_LONE) or -1
"""As it is counted where there is one, and the object that Python has of the memory."""


def ask_first(graph: Graph, expect: Any) -> None:
    """Moves the steps that end a call of another kind, `expect`, with what they look at, if only arguments tell it."""
    early = dict.fromkeys(node for node in graph.nodes if node.op == "placeholder")
    for node in list(graph.nodes):
        if EFFECT in node.meta:
            return
        looks = node.target in (getattr, operator.getitem, expect, "size")
        if looks and node.all_input_nodes and all(source in early for source in node.all_input_nodes):
            next(reversed(early)).append(node)
            early[node] = None
