"""What a forward does to objects that are no tensors, put off to the end of the recorded graph.

There it stands in nobody's way: what comes before can be computed together, and a call that turns out not to be of the
recorded kind, or raises, has changed nothing yet. Whoever puts something off has to answer in its place until then.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

EFFECT = "effect"  # in the meta of a node that has to stay even where nobody uses its result


def set_at_the_end(graph: Graph, settings: list[tuple[Node, str, Any]]) -> None:
    """Sets attributes of objects. Steps that are wanted for nothing else are moved there as well."""
    late: dict[Node, None] = {}
    for holder, name, value in settings:
        node = graph.call_function(setattr, (holder, name, value))
        node.meta[EFFECT] = True
        late[node] = None
    if not late:
        return
    first = next(iter(late))
    for node in reversed(list(graph.nodes)):
        if node.users and node not in late and all(user in late for user in node.users) and _can_wait(node):
            first.prepend(node)
            first = node
            late[node] = None


def _can_wait(node: Node) -> bool:
    """Whether it computes something: what objects hold may be something else by then."""
    return node.op in ("call_function", "call_method") and EFFECT not in node.meta and node.target is not getattr
