"""Slices that leave nothing out, which a language model's head takes of what it is given (`x[:, -0:, :]`): none."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from torch.fx import Graph

from xopt.modules.pattern import Pattern, calls, dtype_of


class DropWholeSlice(Pattern):
    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, operator.getitem):
            source, key = node.args
            # What comes from outside and goes there again is not the same object.
            is_inside = getattr(source, "op", "") not in ("placeholder", "get_attr") and dtype_of(source) is not None
            if is_inside and _leaves_nothing_out(key):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _leaves_nothing_out(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return all(
        type(part) is slice and part.start in (None, 0) and part.stop is None and part.step in (None, 1)
        for part in parts
    )
