"""GroupNorm and InstanceNorm of images whose channels are last in memory, with the activation after them, on
`torch.ops.xopt.group_norm`.

Images in another layout are left to torch, which has no copy to make for them. An InstanceNorm that goes by running
statistics is a BatchNorm, and is folded as such.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.steps import expect
from xopt.modules.activation import ACTIVATIONS, activation_of
from xopt.modules.chain import ANY_DIMS, Call, Seen, Shape, Value, chainable
from xopt.modules.conv import conv
from xopt.modules.conv_transpose import conv_transpose
from xopt.modules.pattern import (
    ADD,
    Pattern,
    argument,
    calls,
    described,
    dtype_of,
    is_call,
    only_user,
    replace,
    shape_of,
    step,
    used_only_for,
)
from xopt.ops.fakes import FLOATING

_FUSED = ("relu", "silu")
_ALL = slice(None)
_group_norm = torch.ops.xopt.group_norm.default


def _label(kwargs: dict[str, Any]) -> str:
    names = ["instance_norm" if kwargs["groups"] is None else "group_norm"]
    if kwargs.get("shift") is not None:
        names.insert(0, "add")
    if kwargs.get("activation"):
        names.append(kwargs["activation"])
    return "+".join(names)


@step(_label, writes_any_dtype=True)
def group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    groups: int | None,
    eps: float,
    out_dtype: torch.dtype,
    activation: str = "none",
    shift: Tensor | None = None,
) -> Tensor:
    """`groups`: None for an InstanceNorm, of which each channel is a group. `shift`: of each image's channels, or of
    those of all; it is added first."""
    if shift is not None and (input.stride(1) != 1 or not _fits(input.shape, shift.shape)):
        input, shift = input + shift.reshape(*shift.shape, *[1] * (input.dim() - 2)), None
    alone = groups is None and input[0, 0].numel() <= 1  # about which torch has something to say
    if input.stride(1) != 1 or alone:
        if groups is None:
            plain = functional.instance_norm(input, None, None, weight, bias, eps=eps)
        else:
            plain = functional.group_norm(input, groups, weight, bias, eps)
        return ACTIVATIONS[activation](plain, 0.0, 0.0).to(out_dtype)
    count = input.shape[1] if groups is None else groups
    return _group_norm(  # type: ignore[no-any-return]
        input, count, weight, bias, eps=eps, activation=activation, out_dtype=out_dtype, shift=shift
    )


def _fits(image: Shape, shift: Shape) -> bool:
    return shift[0] in (1, image[0]) and shift[1] == image[1]


@chainable(group_norm, where=lambda node: node.kwargs["groups"] is not None, takes_images=True)
def _group_norm_call(
    seen: Seen,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    *,
    groups: int,
    eps: float,
    out_dtype: torch.dtype,
    activation: str = "none",
    shift: Value | None = None,
) -> Call:
    arguments = (input, groups, weight, bias, float(eps), activation, out_dtype, shift)
    others = () if shift is None else (shift,)
    fits = None if shift is None else _fits
    return Call(
        "group_norm", arguments, input, lambda image, *others: image, image_dims=ANY_DIMS, others=others, fits=fits
    )


class FindGroupNorm(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.group_norm):
            source: Any = node.args[0]
            groups, weight, bias = (argument(node, place, name) for place, name in _ARGUMENTS)
            if dtype_of(node) in FLOATING and dtype_of(source) in FLOATING and 3 <= len(shape_of(source)) <= 5:
                kwargs = {"groups": groups, "eps": argument(node, 4, "eps", 1e-5), "out_dtype": dtype_of(node)}
                replace(graph, node, group_norm, (source, weight, bias), kwargs)


class FindInstanceNorm(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.instance_norm):
            source: Any = node.args[0]
            mean, variance, weight, bias = (argument(node, place, name) for place, name in _INSTANCE_ARGUMENTS)
            by_input, eps = argument(node, 5, "use_input_stats", True), argument(node, 7, "eps", 1e-5)
            known = dtype_of(node) in FLOATING and dtype_of(source) in FLOATING and 3 <= len(shape_of(source)) <= 5
            if known and by_input is True and mean is None and variance is None:
                kwargs = {"groups": None, "eps": eps, "out_dtype": dtype_of(node)}
                replace(graph, node, group_norm, (source, weight, bias), kwargs)
            elif known and by_input is False:
                _forget_channels(graph, source)
                kwargs = {"weight": weight, "bias": bias, "eps": eps}
                replace(graph, node, functional.batch_norm, (source, mean, variance), kwargs)


def _forget_channels(graph: Graph, image: Any) -> None:
    """An InstanceNorm looks at the number of channels. That of a convolution is the same in all calls; looked at, its
    result would be in use besides."""
    if not is_call(image, conv, conv_transpose):
        return
    for size in [user for user in image.users if is_call(user, "size") and user.args[1:] == (1,)]:
        for user in [user for user in size.users if user.target is expect]:
            graph.erase_node(user)
        if not size.users:
            graph.erase_node(size)


_ARGUMENTS = ((1, "num_groups"), (2, "weight"), (3, "bias"))
_INSTANCE_ARGUMENTS = ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias"))


class GroupNormShift(Pattern):
    """What is added to all positions alike (as a time's embedding), before a norm takes it off again but for what it
    makes of a group's channels."""

    stage: ClassVar[int] = 2
    switch: ClassVar[str] = "fuse_norm"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, group_norm):
            added: Any = node.args[0]
            plain = is_call(added, *ADD) and len(added.args) == 2 and not added.kwargs and only_user(added) is node
            if not plain or node.kwargs["groups"] is None or "shift" in node.kwargs:
                continue
            for image, vector in (added.args, added.args[::-1]):
                alike = shape_of(image) == shape_of(added) and dtype_of(image) == dtype_of(added)
                if alike and _is_shift(vector, image):
                    shift = _as_rows(graph, vector)
                    replace(graph, node, group_norm, (image, *node.args[1:]), node.kwargs | {"shift": shift})
                    break


def _is_shift(vector: Any, image: Any) -> bool:
    """Whether it has one value for each channel, of each image or of all."""
    sizes, image_sizes = shape_of(vector), shape_of(image)
    fits = len(sizes) == len(image_sizes) and _fits(image_sizes, sizes) and dtype_of(vector) in FLOATING
    return fits and _is_spread(vector, len(sizes) - 2)


def _is_spread(vector: Any, dims: int) -> bool:
    """Whether the last dimensions are 1 in all calls: images may have had one pixel when they were recorded."""
    if dims == 0:
        return True
    if is_call(vector, operator.getitem):
        return bool(vector.args[1] == (_ALL, _ALL, *[None] * dims))
    if is_call(vector, "view", "reshape"):
        sizes = vector.args[1] if isinstance(vector.args[1], (tuple, list)) else vector.args[1:]
        return tuple(sizes[-dims:]) == (1,) * dims
    last = is_call(vector, "unsqueeze", torch.unsqueeze) and argument(vector, 1, "dim") == -1
    return last and _is_spread(vector.args[0], dims - 1)


def _as_rows(graph: Graph, vector: Any) -> Node:
    """[images, channels]: what was made an image, or what comes of one."""
    if is_call(vector, operator.getitem):
        rows: Node = vector.args[0]
        return rows
    with graph.inserting_after(vector):
        return described(graph.call_method("flatten", (vector, 1)))


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
