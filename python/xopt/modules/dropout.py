"""Dropout does nothing outside training: recorded graphs leave it out."""

from __future__ import annotations

from typing import ClassVar

from torch.fx import Graph
from torch.nn import functional

from xopt.modules.pattern import Pattern, argument, calls

_DROPOUTS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
)


class DropDropout(Pattern):
    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "replace_dropout_with_identity"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, *_DROPOUTS):
            if argument(node, 2, "training", True) is False or argument(node, 1, "p", 0.5) == 0:
                node.replace_all_uses_with(node.args[0])
