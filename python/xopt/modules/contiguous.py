"""`x.contiguous()` of an image whose channels are last, which a forward asks for so that it can go on with torch's
layout: left out, since what follows takes either. Otherwise all of it would run in the other layout from there on.
"""

from __future__ import annotations

from typing import ClassVar

from torch.fx import Graph

from xopt.modules.pattern import Pattern, calls, replace, shape_of
from xopt.ops.views import FORMATS, contiguous_unless_channels_last


class KeepChannelsLast(Pattern):
    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "fuse_conv"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, "contiguous"):
            if len(node.args) == 1 and not node.kwargs and len(shape_of(node)) in FORMATS:
                new = replace(graph, node, contiguous_unless_channels_last, node.args, {})
                for user in new.users:
                    if user.op == "call_method" and user.target == "view":
                        user.target = "reshape"
