"""Steps of a program that follow each other and are one operator call each, as one call of an operator.

A call from Python costs as much as a convolution of a small image. What a step's call is depends on its module alone:
`chainable` says how it is told. It is asked once; what it has looked at (`Seen`) is watched natively from then on, and
asked for again when any of it has changed. A chain whose calls cannot be told (a weight that is no longer packed), or
that somebody watches (a profiler, a dispatch mode), runs step by step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.fx import Graph, Node

from xopt import _C, ops  # noqa: F401 - loads them
from xopt.graph.program import MODULES
from xopt.modules.pattern import is_call, remove_unused
from xopt.ops.chain import Given, Result, call_text, calls_text

Tensor = torch.Tensor
Value = Given | Result
Shape = tuple[int, ...]

_chain = torch.ops.xopt.chain.default
_MOST_SHAPES = 64  # that a chain remembers to fit


class Stored(NamedTuple):
    """A parameter or buffer of the program's modules."""

    path: str
    name: str


class Call(NamedTuple):
    """What a step is as an operator's call."""

    op: str
    arguments: tuple[Any, ...]
    """In the order of its schema: constants, what `Seen` gave, and values of the chain."""
    input: Value
    shape: Callable[[Shape], Shape]
    """The result's, by that of the input. It must not hold the module, whose program holds it."""
    image_dims: int | None = None
    """How many dimensions the input has to have; its channels have to be last in memory, unless:"""
    any_layout: bool = False
    alike: Value | None = None
    """What has to have the shape of the result."""


Teller = TypeVar("Teller", bound=Callable[..., Call | None])
_tellers: dict[Any, tuple[Callable[..., Call | None], Callable[[Node], bool]]] = {}


def chainable(step: Any, where: Callable[[Node], bool]) -> Callable[[Teller], Teller]:
    """Marks the function that tells what call of an operator a step of a module is, or None where it is none: it takes
    a `Seen` and then the step's arguments. Of those, tensors are `Given` or `Result`, and in tuples `Stored`. `where`:
    which of a graph's steps are worth asking for."""

    def mark(teller: Teller) -> Teller:
        _tellers[step] = teller, where
        return teller

    return mark


class Seen:
    """What is looked at to tell the calls of a chain, which `operands` then watches, and the tensors that they take."""

    def __init__(self, modules: list[nn.Module], given: int) -> None:
        self.operands = _C.Operands()
        self.lasts = True
        """Whether all of it can be watched."""
        self._modules = modules
        self._places = {id(module): place for place, module in enumerate(modules)}
        self._tensors = given

    def attribute(self, module: nn.Module, name: str) -> Any:
        value = getattr(module, name)
        value = list(value) if type(value) is list else value
        self.operands.expect_attribute(self._places[id(module)], name, value)
        return value

    def tensor(self, module: nn.Module, name: str) -> Tensor | None:
        """A parameter or buffer that something is computed from."""
        found: Tensor | None = getattr(module, name)
        counted = found is not None and not found.is_inference()
        self.lasts &= found is None or counted
        version = found._version if found is not None and counted else -1
        self.operands.expect_tensor(self._places[id(module)], name, found, version)
        return found

    def stored(self, tensor: Stored | None) -> Tensor | None:
        """The same by its path."""
        return None if tensor is None else self.tensor(self._modules[0].get_submodule(tensor.path), tensor.name)

    def parameter(self, module: nn.Module, name: str) -> Given | None:
        """A parameter that the operator takes."""
        found = module._parameters[name]
        if found is None:
            self.tensor(module, name)
            return None
        self.operands.take_tensor(self._places[id(module)], name, found)
        return self._next()

    def packed(self, module: nn.Module, name: str, packed: Tensor) -> Given:
        """What a packed parameter lies in, which the operator takes."""
        self.operands.take_packed(self._places[id(module)], name, packed)
        return self._next()

    def own(self, tensor: Tensor | None) -> Given | None:
        """A tensor for the operator that was computed from what was looked at."""
        if tensor is None:
            return None
        self.operands.take(tensor)
        return self._next()

    def _next(self) -> Given:
        self._tensors += 1
        return Given(self._tensors - 1)


class Link(NamedTuple):
    """A step of a chain."""

    step: Any
    path: str
    """Its module's."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Settled(NamedTuple):
    """A chain's calls, for as long as nothing has changed that was looked at to tell them."""

    operands: _C.Operands
    calls: list[Call]
    text: str
    images: list[tuple[int, int, bool]]
    """Values that have to be images: their places, dimensions, and whether any layout will do."""
    fitting: dict[tuple[torch.Size, ...], bool] | None
    """By the shapes of the values, whether what has to be alike is; None: there is no such thing."""


class Chain:
    """The step of a program that is several: called with the program's modules and the values from outside."""

    def __init__(self, links: tuple[Link, ...], returned: list[Result]) -> None:
        self._links = links
        self._returned = returned
        self._settled: Settled | None = None

    def run(self, modules: list[nn.Module], *values: Tensor) -> Sequence[Tensor]:
        settled = self._settled
        if not is_watched():
            tensors = None if settled is None else settled.operands.gather(modules, values)
            if tensors is None:
                settled = self._settled = self._settle(modules, len(values))
                tensors = None if settled is None else settled.operands.gather(modules, values)
            if tensors is not None and settled is not None and _fits(settled, values):
                return _chain(tensors, settled.text)  # type: ignore[no-any-return]
        return self._step_by_step(modules, values)

    def _settle(self, modules: list[nn.Module], given: int) -> Settled | None:
        """None: its calls cannot be told, or not for longer than this one."""
        seen = Seen(modules, given)
        calls: list[Call] = []
        for link in self._links:
            teller, _ = _tellers[link.step]
            call = teller(seen, modules[0].get_submodule(link.path), *link.args, **link.kwargs)
            if call is None or not seen.lasts:
                return None
            calls.append(call)
        text = calls_text([call_text(call.op, call.arguments) for call in calls], self._returned)
        images = [
            (call.input.place, call.image_dims, call.any_layout)
            for call in calls
            if isinstance(call.input, Given) and call.image_dims is not None
        ]
        return Settled(seen.operands, calls, text, images, {} if any(call.alike for call in calls) else None)

    def _step_by_step(self, modules: list[nn.Module], values: Sequence[Tensor]) -> Sequence[Tensor]:
        results: list[Tensor] = []

        def value(argument: Any) -> Any:
            if isinstance(argument, Given):
                return values[argument.place]
            if isinstance(argument, Result):
                return results[argument.number]
            if isinstance(argument, Stored):
                return getattr(modules[0].get_submodule(argument.path), argument.name)
            return tuple(value(each) for each in argument) if type(argument) is tuple else argument

        for link in self._links:
            kwargs = {name: value(each) for name, each in link.kwargs.items()}
            module = modules[0].get_submodule(link.path)
            results.append(link.step(module, *(value(each) for each in link.args), **kwargs))
        return [results[each.number] for each in self._returned]


def is_watched() -> bool:
    """Whether somebody sees each operator that is called."""
    return torch.autograd.profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0


def _fits(settled: Settled, values: Sequence[Tensor]) -> bool:
    for place, dims, any_layout in settled.images:
        value = values[place]
        if value.dim() != dims or not (any_layout or value.stride(1) == 1):
            return False
    if settled.fitting is None:
        return True
    shapes = tuple([value.shape for value in values])
    known = settled.fitting.get(shapes)
    if known is None:
        if len(settled.fitting) >= _MOST_SHAPES:
            settled.fitting.clear()
        known = settled.fitting[shapes] = _are_alike(settled.calls, shapes)
    return known


def _are_alike(calls: Sequence[Call], shapes: Sequence[torch.Size]) -> bool:
    """Whether what calls have to find alike is so: what is added has to have the shape of what it is added to."""
    results: list[Shape] = []

    def shape_of(value: Value) -> Shape:
        return tuple(shapes[value.place]) if isinstance(value, Given) else results[value.number]

    for call in calls:
        results.append(call.shape(shape_of(call.input)))
        if call.alike is not None and shape_of(call.alike) != results[-1]:
            return False
    return True


# ---- In a graph ------------------------------------------------------------------------------------------------------


def chain_steps(graph: Graph) -> None:
    """Makes one step of those that nothing stands between."""
    together: list[Node] = []
    for node in list(graph.nodes):
        if _can_be_link(node):
            together.append(node)
        elif node.op != "get_attr":
            _chain_together(graph, together)
            together = []
    remove_unused(graph)


def _can_be_link(node: Node) -> bool:
    if not is_call(node, *_tellers):
        return False
    _, where = _tellers[node.target]
    return _is_stored(node.args[0]) and all(map(_is_stored, _in_tuples(node))) and where(node)


def _is_stored(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "get_attr"


def _in_tuples(node: Node) -> list[Node]:
    """Arguments that are no arguments of their own: what a norm has."""
    containers = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, (tuple, list))]
    return [item for each in containers for item in each if isinstance(item, Node)]


def _chain_together(graph: Graph, nodes: list[Node]) -> None:
    if len(nodes) < 2:
        return
    numbers = {node: Result(number) for number, node in enumerate(nodes)}
    values: list[Node] = []

    def stored(argument: Any) -> Stored | None:
        if argument is None:
            return None
        path, _, name = str(argument.target).partition(":")
        return Stored(path, name)

    def told(argument: Any) -> Any:
        if isinstance(argument, (tuple, list)):  # what a norm has, or numbers
            return tuple(stored(each) if each is None or isinstance(each, Node) else each for each in argument)
        if not isinstance(argument, Node):
            return argument
        if argument in numbers:
            return numbers[argument]
        if argument not in values:
            values.append(argument)
        return Given(values.index(argument))

    links = []
    for node in nodes:
        module: Any = node.args[0]
        kwargs = {name: told(each) for name, each in node.kwargs.items()}
        path, _, _ = str(module.target).partition(":")
        links.append(Link(node.target, path, tuple(map(told, node.args[1:])), kwargs))
    returned = [node for node in nodes if any(user not in numbers for user in node.users)]
    chain = Chain(tuple(links), [numbers[node] for node in returned])
    with graph.inserting_before(nodes[-1]):
        modules = graph.create_node("get_attr", MODULES)
        results = graph.call_function(chain.run, (modules, *values))
        for place, node in enumerate(returned):
            result = graph.call_function(operator.getitem, (results, place))
            result.meta.update(node.meta)
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in numbers)
    for node in reversed(nodes):
        graph.erase_node(node)
