"""Convolutions of a program that follow each other, as one call of an operator.

A call from Python costs as much as a convolution of a small image, most of it for arguments that never change. Those
are made into one list of numbers; what may change is looked at in each call: weights, folded norms, geometry, and
whether somebody watches the single operators (a profiler, a dispatch mode), who then sees them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from xopt.graph.record import EXAMPLE, expect
from xopt.modules.conv import (
    PackedConv,
    amounts_of,
    computes_channels_last,
    conv,
    output_shape_of,
    packed_weight,
)
from xopt.modules.folded_norm import folded
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.pattern import is_call, remove_unused
from xopt.ops.conv import ChainLink
from xopt.ops.fakes import FLOATING

Tensor = torch.Tensor
Norm = tuple[Tensor | None, ...] | None
Operands = tuple[PackedParameter, Tensor | None, Tensor | None]  # weight, bias and scale

_conv_chain = torch.ops.xopt.conv_chain.default
_MOST_SHAPES = 64  # that a chain remembers to fit


class Link(NamedTuple):
    """A convolution of a chain. Values are told by their place among the chain's, and the result of link i is ~i."""

    input: int
    other: int | None
    pad: tuple[int, ...]
    eps: float
    after: dict[str, Any]
    """What `conv` is told of its result, by name."""


class Prepared(NamedTuple):
    """What the operator is told besides tensors."""

    links: list[int]
    parameters: list[float]
    names: str


class Chain:
    """What a program knows of a chain, and what was prepared for its last call."""

    def __init__(self, links: tuple[Link, ...], wanted: list[int]) -> None:
        self.links = links
        self.wanted = wanted
        self._geometry: Any = None
        self._prepared = Prepared([], [], "")
        self._fitting: dict[tuple[torch.Size, ...], bool] = {}

    def prepared(
        self, modules: Sequence[Any], values: Sequence[Tensor], operands: Sequence[Operands]
    ) -> Prepared | None:
        """For this call; None: it is none for the operator."""
        for link, module in zip(self.links, modules, strict=True):
            if link.input >= 0:
                value = values[link.input]
                if value.dim() != len(module.kernel_size) + 2:
                    return None
                if value.stride(1) != 1 and not computes_channels_last(module):
                    return None
        geometry = [_geometry(module, own) for module, own in zip(modules, operands, strict=True)]
        if geometry != self._geometry:
            if any(module.padding_mode != "zeros" for module in modules):
                return None
            self._prepared = self._prepare(modules, len(values), operands)
            self._fitting = {}
            self._geometry = geometry
        return self._prepared if self._fits(modules, values) else None

    def _prepare(self, modules: Sequence[Any], values: int, operands: Sequence[Operands]) -> Prepared:
        places, first = [], values
        for own in operands:
            for each in own:
                places.append(-1 if each is None else first)
                first += each is not None

        def place(value: int | None) -> int:
            return -1 if value is None else value if value >= 0 else first + ~value

        links: list[int] = []
        parameters: list[float] = []
        names: list[str] = []
        for i, (link, module) in enumerate(zip(self.links, modules, strict=True)):
            links += ChainLink(
                places=[place(link.input), *places[3 * i : 3 * i + 3], place(link.other)],
                groups=module.groups,
                activation_last=link.after.get("activation_last", False),
                out_dtype=link.after["out_dtype"],
                weight_size=operands[i][0].shape,
                stride=module.stride,
                padding=amounts_of(module.padding, module.kernel_size, module.dilation, link.pad),
                dilation=module.dilation,
            ).numbers()
            parameters += [link.after.get("alpha", 0.0), link.after.get("beta", 0.0)]
            names += [link.after.get("activation", "none"), link.after.get("binary", "none")]
        return Prepared(links, parameters, " ".join(names))

    def _fits(self, modules: Sequence[Any], values: Sequence[Tensor]) -> bool:
        """Whether what is added has the shape of what it is added to."""
        if all(link.other is None for link in self.links):
            return True
        shapes = tuple([value.shape for value in values])
        known = self._fitting.get(shapes)
        if known is None:
            if len(self._fitting) >= _MOST_SHAPES:
                self._fitting = {}
            known = self._fitting[shapes] = self._fit(modules, shapes)
        return known

    def _fit(self, modules: Sequence[Any], shapes: Sequence[torch.Size]) -> bool:
        results: list[tuple[int, ...]] = []

        def shape(value: int) -> tuple[int, ...]:
            return tuple(shapes[value]) if value >= 0 else results[~value]

        for link, module in zip(self.links, modules, strict=True):
            results.append(output_shape_of(module, shape(link.input), link.pad))
            if link.other is not None and shape(link.other) != results[-1]:
                return False
        return True


def _geometry(module: Any, operands: Operands) -> tuple[Any, ...]:
    _, bias, scale = operands
    own = (module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    return (*own, bias is None, scale is None)


def conv_chain(
    chain: Chain, modules: Sequence[PackedConv], values: Sequence[Tensor], norms: Sequence[Norm]
) -> Sequence[Tensor]:
    """The step of a program: the results of the chain that are wanted. `values`: what its convolutions read, inputs and
    what is added; `norms`: for each what a BatchNorm folded into it has, or None."""
    if is_watched():
        return _one_by_one(chain, modules, values, norms)
    operands: list[Operands] = []
    for module, norm, link in zip(modules, norms, chain.links, strict=True):
        weight = packed_weight(module)
        if weight is None:
            return _one_by_one(chain, modules, values, norms)
        scale, bias = folded(module, module._parameters["bias"], norm, link.eps)
        operands.append((weight, bias, scale))
    prepared = chain.prepared(modules, values, operands)
    if prepared is None:
        return _one_by_one(chain, modules, values, norms)
    tensors = [*values]
    for own, bias, scale in operands:
        tensors += [each for each in (own.place.packed, bias, scale) if each is not None]
    return _conv_chain(tensors, *prepared, chain.wanted)  # type: ignore[no-any-return]


def is_watched() -> bool:
    """Whether somebody sees each operator that is called."""
    return torch.autograd.profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0


def _one_by_one(
    chain: Chain, modules: Sequence[PackedConv], values: Sequence[Tensor], norms: Sequence[Norm]
) -> Sequence[Tensor]:
    results: list[Tensor] = []

    def value(place: int) -> Tensor:
        return values[place] if place >= 0 else results[~place]

    for module, norm, link in zip(modules, norms, chain.links, strict=True):
        other = None if link.other is None else value(link.other)
        input = value(link.input)
        results.append(conv(module, input, norm=norm, eps=link.eps, other=other, pad=link.pad, **link.after))
    return [results[each] for each in chain.wanted]


# ---- In a graph ------------------------------------------------------------------------------------------------------


def chain_convolutions(graph: Graph) -> None:
    """Makes one step of convolutions that nothing stands between."""
    _drop_known_sizes(graph)
    together: list[Node] = []
    for node in list(graph.nodes):
        if is_call(node, conv) and _can_be_link(node):
            together.append(node)
        elif node.op != "get_attr":
            _chain(graph, together)
            together = []


def _drop_known_sizes(graph: Graph) -> None:
    """Takes out what a forward expects of a convolution's result (TensorFlow's padding looks at each image), where the
    same was expected of the image that it came from."""
    known: set[tuple[Any, Any]] = set()
    for node in list(graph.nodes):
        if node.target is expect:
            function, size, _, outcome = node.args
            if function is operator.eq and outcome is True and is_call(size, "size"):
                what = tuple(size.args)
                if what in known:
                    graph.erase_node(node)
                known.add(what)
        elif is_call(node, conv):
            other = node.kwargs.get("other")  # might be spread over more than the result
            sizes = [dim for image, dim in known if image is node.args[1]]
            known |= {(node, dim) for dim in sizes if other is None or (other, dim) in known}
    remove_unused(graph)


def _can_be_link(node: Node) -> bool:
    module: Any = node.args[0]
    is_plain = isinstance(module, Node) and module.meta[EXAMPLE].padding_mode == "zeros"
    pad: Any = node.kwargs.get("pad", ())
    is_constant = all(type(amount) is int and amount >= 0 for amount in pad)
    return is_plain and is_constant and node.kwargs.get("out_dtype") in FLOATING


def _chain(graph: Graph, nodes: list[Node]) -> None:
    if len(nodes) < 2:
        return
    places: dict[Any, int] = {}
    values: list[Any] = []

    def place(value: Any) -> int:
        if value not in places:
            places[value] = len(values)
            values.append(value)
        return places[value]

    links = []
    for i, node in enumerate(nodes):
        kwargs: dict[str, Any] = dict(node.kwargs)
        kwargs.pop("norm", None)
        other, pad, eps = kwargs.pop("other", None), kwargs.pop("pad", ()), kwargs.pop("eps", 0.0)
        links.append(Link(place(node.args[1]), None if other is None else place(other), pad, eps, kwargs))
        places[node] = ~i
    wanted = [i for i, node in enumerate(nodes) if any(user not in nodes for user in node.users)]
    norms = [node.kwargs.get("norm") for node in nodes]
    chain: Any = Chain(tuple(links), wanted)
    with graph.inserting_before(nodes[-1]):
        results = graph.call_function(conv_chain, (chain, [node.args[0] for node in nodes], values, norms))
        for at, i in enumerate(wanted):
            result = graph.call_function(operator.getitem, (results, at))
            result.meta.update(nodes[i].meta)
            nodes[i].replace_all_uses_with(result, delete_user_cb=lambda user: user not in nodes)
    for node in reversed(nodes):
        graph.erase_node(node)
