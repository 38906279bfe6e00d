"""Moves what has to do with objects that are no tensors to where it stands in nobody's way: what is asked of a call to
the beginning of a recorded graph, and what is done to objects to its end.

What is between can be computed together, a call that turns out not to be of the recorded kind has computed nothing, and
one that raises has changed nothing. Whoever puts something off has to answer in its place until then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

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
