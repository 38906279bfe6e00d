"""Which steps of a graph become chains: those that follow each other, with the views between them.

A view costs a chain next to nothing, and Python as much as an operator: it is a link wherever somebody wants it. A size
that somebody behind the chain wants stays what it was, behind it. What has nothing to do with a chain's links may stand
between them.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch.fx import Graph, Node

from xopt.graph.late import EFFECT
from xopt.graph.program import MODULES
from xopt.graph.steps import expect
from xopt.modules.chain import Chain, Link, Linkable, Stored, linkables
from xopt.modules.pattern import argument, dtype_of, is_call, remove_unused, shape_of
from xopt.modules.told_sizes import is_negative, is_size, is_told_number, sign_of
from xopt.ops.chain import Computed, Given, Number, Result, SizeOf
from xopt.ops.views import FORMATS, channels_last


def chain_steps(graph: Graph, lays_out: bool) -> None:
    """Makes one step of those that nothing stands between. `lays_out`: whether convolutions answer with the channels
    last whatever they are given, so that their images may be laid out so before."""
    window = _Window(graph)
    _gather_parts(graph)
    # Asked before the first chain is made: whose dtype is fixed is told by what it comes from.
    kinds = {node: kind_of(node) for node in graph.nodes if node.op not in ("placeholder", "get_attr")}
    for node, kind in kinds.items():
        takes_image = kind is not None and kind.takes_images and not _has_one_channel(node)
        if takes_image and window.lies_otherwise(_image_of(node)):
            if lays_out and len(shape_of(_image_of(node))) in FORMATS:
                window.lay_out(node)
            else:
                window.close()
        if kind is not None or is_told_number(node) or window.has_part(node):
            window.add(node, kind)
        elif EFFECT in node.meta or window.is_needed_by(node):
            window.close()
    window.close()
    remove_unused(graph)


def _gather_parts(graph: Graph) -> None:
    """Puts the results of a link of several where it stands: one that only an effect wants (a state that a cache is to
    keep) came with that, behind everything."""
    for node in list(graph.nodes):
        kind = linkables[node.target] if is_call(node, *linkables) else None
        if kind is not None and kind.has_parts and all(map(is_part, node.users)):
            for part in reversed(list(node.users)):
                node.append(part)


def _image_of(node: Node) -> Any:
    """What a step takes first but for its module."""
    return next((each for each in node.args if isinstance(each, Node) and each.op != "get_attr"), None)


def _has_one_channel(node: Node) -> bool:
    """Of an image that has one channel and comes to have one, any layout is with the channels last."""
    return shape_of(node)[1:2] == shape_of(_image_of(node))[1:2] == (1,)


def kind_of(node: Node) -> Linkable | None:
    """How a step is a link; None: it is none."""
    kind = linkables[node.target] if is_call(node, *linkables) else None
    if kind is None or not all(_is_operand(each) for each in node.all_input_nodes) or not kind.where(node):
        return None
    return kind if not kind.has_parts or all(map(is_part, node.users)) else None


def _is_operand(node: Node) -> bool:
    return node.op == "get_attr" or is_told_number(node) or dtype_of(node) is not None


def is_part(node: Any) -> bool:
    return is_call(node, operator.getitem) and type(node.args[1]) is int


class _Window:
    """Steps that follow each other: links that compute, views, sizes, and parts of several results."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._begin()

    def _begin(self) -> None:
        self._kinds: dict[Node, Linkable | None] = {}
        self._computing: list[Node] = []
        self._dependent: set[Node] = set()
        """What computing links give, and what is made of it."""
        self._handed_on: set[Node] = set()
        """Views of that, which the chain answers with."""

    def add(self, node: Node, kind: Linkable | None) -> None:
        self._kinds[node] = kind
        if kind is not None and not kind.is_view:
            self._computing.append(node)
            self._dependent.add(node)
        elif self.is_needed_by(node):
            self._dependent.add(node)

    def is_needed_by(self, node: Node) -> bool:
        return any(each in self._dependent for each in node.all_input_nodes)

    def lies_otherwise(self, node: Any) -> bool:
        """Whether it is a view that is not known to lie in memory as the images of links do."""
        step = node.args[0] if self.has_part(node) else node
        kind = self._kinds.get(step)
        if kind is None or not kind.is_view:
            return False
        source, is_last = step.args[0], kind.channels_last(step)
        return source not in self._kinds or is_last is False or (is_last is None and self.lies_otherwise(source))

    def lay_out(self, node: Node) -> None:
        """Has a step take its image with the channels last."""
        image = _image_of(node)
        with self._graph.inserting_before(node):
            laid_out = self._graph.call_function(channels_last, (image,))
        laid_out.meta.update(image.meta)
        node.replace_input_with(image, laid_out)
        self.add(laid_out, linkables[channels_last])

    def has_part(self, node: Node) -> bool:
        return is_part(node) and self._has_parts(node.args[0])

    def _is_torchs(self, node: Node) -> bool:
        kind = self._kinds[node]
        return kind is not None and kind.is_torchs

    def _has_parts(self, node: Any) -> bool:
        kind = self._kinds.get(node)
        return kind is not None and kind.has_parts

    def close(self) -> None:
        """Makes a chain of what is in it, and begins anew."""
        if len(self._computing) > 1 and not all(self._is_torchs(node) for node in self._computing):
            self._chain()
        self._begin()

    def _chain(self) -> None:
        self._handed_on = self._views_handed_on()
        chained = _Chained(self._links())
        outside = self._outside()
        seen = {node: None for node in self._kinds if self._is_value(node) and self._is_wanted(node, outside)}
        returned = list(dict.fromkeys(chained.value(node) for node in seen))
        chain = Chain(tuple(chained.links), [value for value in returned if isinstance(value, Result)])
        now: dict[Node, Node] = {}
        with self._graph.inserting_before(self._computing[-1]):
            modules = self._graph.create_node("get_attr", MODULES)
            results = self._graph.call_function(chain.run, (modules, *chained.given))
            for node in seen:
                place = returned.index(chained.value(node))
                now[node] = self._graph.call_function(operator.getitem, (results, place))
        behind = set(list(self._kinds)[list(self._kinds).index(self._computing[-1]) :])
        for node in outside:
            with self._graph.inserting_before(node if node in behind else self._computing[-1]):
                now[node] = self._graph.node_copy(node, lambda source: now.get(source, source))
            if now[node].target == "view":  # what it is of may lie otherwise now
                now[node].target = "reshape"
        for node, instead in now.items():
            instead.meta.update(node.meta)
            node.replace_all_uses_with(instead, delete_user_cb=lambda user: user not in self._kinds)
        for node in reversed(self._kinds):
            if node in self._dependent:
                self._graph.erase_node(node)

    def _views_handed_on(self) -> set[Node]:
        """Those that somebody behind the chain wants, if all of their sizes are known where the chain will stand."""
        place = {node: number for number, node in enumerate(self._graph.nodes)}
        here = place[self._computing[-1]]

        def is_known(node: Node) -> bool:
            if node not in self._kinds:
                return place[node] < here
            return node in self._computing or all(map(is_known, node.all_input_nodes))

        def is_handed_on(node: Node, kind: Linkable | None) -> bool:
            is_view = kind is not None and kind.is_view and not kind.has_parts and node in self._dependent
            return is_view and any(user not in self._kinds for user in node.users) and is_known(node)

        return {node for node, kind in self._kinds.items() if is_handed_on(node, kind)}

    def _links(self) -> list[Node]:
        """The computing ones, what is expected of their sizes, and the views that somebody wants."""
        wanted = {*self._computing, *self._handed_on, *(node for node in self._dependent if node.target is expect)}
        for node in reversed(self._kinds):
            if node in wanted:
                wanted.update(each for each in node.all_input_nodes if each in self._kinds)
        return [node for node, kind in self._kinds.items() if node in wanted and kind is not None]

    def _is_value(self, node: Node) -> bool:
        """Whether it is what a computing link gives, or handed on."""
        if node in self._handed_on:
            return True
        source: Any = node.args[0] if self.has_part(node) else node
        kind = self._kinds[source]
        return kind is not None and not kind.is_view and (source is not node or not kind.has_parts)

    def _is_wanted(self, node: Node, outside: dict[Node, None]) -> bool:
        return any(user not in self._kinds or user in outside for user in node.users)

    def _outside(self) -> dict[Node, None]:
        """Sizes of what the chain gives, and other views, that somebody behind it wants."""
        found: dict[Node, None] = {}
        for node in reversed(self._kinds):
            made = node in self._dependent and node not in self._computing and not self._is_value(node)
            if made and self._is_wanted(node, found):
                found[node] = None
        return dict.fromkeys(reversed(found))


class _Chained:
    """Nodes as links."""

    def __init__(self, nodes: list[Node]) -> None:
        self.links: list[Link] = []
        self.given: list[Node] = []
        self._numbers: dict[Node, int] = {}
        for node in nodes:
            args = tuple(self._told(each) for each in node.args)
            kwargs = {name: self._told(each) for name, each in node.kwargs.items()}
            parts: list[Any] = [user.args[1] for user in node.users if is_part(user)]
            self.links.append(Link(node.target, args, kwargs, max(parts, default=-1) + 1))
            self._numbers[node] = len(self.links) - 1

    def _told(self, argument: Any) -> Any:
        if isinstance(argument, (tuple, list)):
            return tuple(self._told(each) for each in argument)
        if isinstance(argument, slice):
            return slice(*map(self._told, (argument.start, argument.stop, argument.step)))
        return self.value(argument) if isinstance(argument, Node) else argument

    def value(self, node: Node) -> Given | Result | Number | Stored:
        if node.op == "get_attr":
            path, _, name = str(node.target).partition(":")
            return Stored(path, name)
        source: Any = node.args[0] if node.args else None
        if is_told_number(node):
            return self._number(node)
        if node in self._numbers:
            return Result(self._numbers[node])
        if is_part(node) and source in self._numbers:
            return Result(self._numbers[source], node.args[1])  # type: ignore[arg-type]
        if node not in self.given:
            self.given.append(node)
        return Given(self.given.index(node))

    def _number(self, node: Any) -> Number:
        if not isinstance(node, Node):
            return node  # type: ignore[no-any-return]
        sign = sign_of(node)
        if sign is not None:
            left, right = map(self._number, node.args)
            return Computed(sign, left, right)
        if is_negative(node):
            return Computed("-", 0, self._number(node.args[0]))
        of: Any = self.value(node.args[0])  # type: ignore[arg-type]
        dims = len(shape_of(node.args[0]))
        if is_size(node):
            return SizeOf(of, argument(node, 1, "dim") % dims)
        sizes: list[Number] = [SizeOf(of, dim) for dim in range(dims)]
        return functools.reduce(lambda left, right: Computed("*", left, right), sizes or [1])
