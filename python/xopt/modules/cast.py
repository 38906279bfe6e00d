"""A change of dtype after a step that can write any: it writes that one at once, and what it has computed is rounded
once, not twice."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.fx import Graph, Node

from xopt.modules.pattern import Pattern, dtype_of, is_cast, only_reader, writes_any_dtype
from xopt.ops.fakes import FLOATING


class WriteCast(Pattern):
    stage: ClassVar[int] = 5
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in list(graph.nodes):
            source: Any = node.args[0] if is_cast(node) and _says_no_more(node) else None
            if writes_any_dtype(source) and only_reader(source) is node and dtype_of(node) in FLOATING:
                source.kwargs = {**source.kwargs, "out_dtype": dtype_of(node)}
                source.meta.update(node.meta)
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _says_no_more(cast: Node) -> bool:
    """Than a dtype: no layout, and no wish for a copy."""
    return len(cast.args) <= 2 and cast.kwargs.keys() <= {"dtype"}
