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
    only_reader,
    put_in_place,
    readers,
    rounded_to,
    writes_any_dtype,
)
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
                put_in_place(graph, node, source)


class WriteRounded(Pattern):
    """A result that is rounded by each of its readers (what a BatchNorm in fp32 gives to a convolution in bf16) is
    written so at once: the same numbers in half of the memory."""

    stage: ClassVar[int] = 6
    switch: ClassVar[str] = "fuse_linear"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in graph.nodes:
            found = readers(node)
            if not found or not writes_any_dtype(node) or dtype_of(node) != torch.float32:
                continue
            dtypes = {rounded_to(node, reader) for reader in found}
            if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16}:
                node.kwargs = {**node.kwargs, "out_dtype": dtypes.pop()}
                node.meta[EXAMPLE] = node.meta[EXAMPLE]._replace(dtype=node.kwargs["out_dtype"])


def _says_no_more(cast: Node) -> bool:
    """Than a dtype: no layout, and no wish for a copy."""
    return len(cast.args) <= 2 and cast.kwargs.keys() <= {"dtype"}
