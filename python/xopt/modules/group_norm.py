"""GroupNorm of images whose channels are last in memory, with the activation after it, on `torch.ops.xopt.group_norm`.

Images in another layout are left to torch, which has no copy to make for them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.modules.activation import ACTIVATIONS, activation_of
from xopt.modules.pattern import Pattern, argument, calls, dtype_of, is_call, replace, shape_of, step, used_only_for
from xopt.ops.fakes import FLOATING

_FUSED = ("relu", "silu")
_group_norm = torch.ops.xopt.group_norm.default


@step(lambda kwargs: "group_norm" + (f"+{kwargs['activation']}" if kwargs.get("activation") else ""))
def group_norm(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    out_dtype: torch.dtype,
    activation: str = "none",
) -> Tensor:
    if input.stride(1) != 1:
        plain = functional.group_norm(input, groups, weight, bias, eps)
        return ACTIVATIONS[activation](plain, 0.0, 0.0).to(out_dtype)
    return _group_norm(input, groups, weight, bias, eps=eps, activation=activation, out_dtype=out_dtype)  # type: ignore[no-any-return]


class FindGroupNorm(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.group_norm):
            source: Any = node.args[0]
            groups, weight, bias = (argument(node, place, name) for place, name in _ARGUMENTS)
            if dtype_of(node) in FLOATING and dtype_of(source) in FLOATING and 3 <= len(shape_of(source)) <= 5:
                kwargs = {"eps": argument(node, 4, "eps", 1e-5), "out_dtype": dtype_of(node)}
                replace(graph, node, group_norm, (source, groups, weight, bias), kwargs)


_ARGUMENTS = ((1, "num_groups"), (2, "weight"), (3, "bias"))


class GroupNormActivation(Pattern):
    stage: ClassVar[int] = 3
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in list(graph.nodes):
            found = activation_of(node)
            if found is None or not is_call(found[0], group_norm) or found[1]["activation"] not in _FUSED:
                continue
            source, activation = found
            if "activation" not in source.kwargs and used_only_for(source, node) and dtype_of(node) == dtype_of(source):
                replace(graph, node, group_norm, source.args, source.kwargs | activation)
