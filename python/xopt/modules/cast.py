"""A change of dtype after a step that can write any: it writes that one at once, and what it has computed is rounded
once, not twice."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE
from xopt.modules.pattern import (
    Pattern,
    dtype_of,
    is_cast,
    is_view,
    only_reader,
    put_in_place,
    readers,
    rounded_to,
    writes_any_dtype,
)
from xopt.ops.fakes import FLOATING

_HALVES = {torch.bfloat16, torch.float16}


class WriteCast(Pattern):
    stage: ClassVar[int] = 5
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in list(graph.nodes):
            source: Any = node.args[0] if is_cast(node) and _says_no_more(node) else None
            if writes_any_dtype(source) and only_reader(source) is node and dtype_of(node) in FLOATING:
                source.kwargs = {**source.kwargs, "out_dtype": dtype_of(node)}
                put_in_place(graph, node, source)


class WriteRounded(Pattern):
    """A result that is rounded by each of its readers (what a BatchNorm in fp32 gives to a convolution in bf16) is
    written so at once: the same numbers in half of the memory."""

    stage: ClassVar[int] = 6
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in graph.nodes:
            write_rounded(node)


def write_rounded(node: Node) -> None:
    if not writes_any_dtype(node) or dtype_of(node) != torch.float32:
        return
    dtypes, views = _rounded(node)
    if len(dtypes) == 1 and dtypes <= _HALVES:
        node.kwargs = {**node.kwargs, "out_dtype": dtypes.pop()}
        for each in (node, *views):
            each.meta[EXAMPLE] = each.meta[EXAMPLE]._replace(dtype=node.kwargs["out_dtype"])


def _rounded(node: Node) -> tuple[set[torch.dtype | None], list[Node]]:
    """The dtypes in which a result is read, be it through views, and these."""
    dtypes: set[torch.dtype | None] = set()
    views: list[Node] = []
    for reader in readers(node):
        if is_view(reader) and reader.all_input_nodes == [node] and dtype_of(reader) == dtype_of(node):
            found, more = _rounded(reader)
            dtypes |= found
            views += [reader, *more]
        else:
            dtypes.add(rounded_to(node, reader))
    return dtypes, views


def _says_no_more(cast: Node) -> bool:
    """Than a dtype: no layout, and no wish for a copy."""
    return len(cast.args) <= 2 and cast.kwargs.keys() <= {"dtype"}
