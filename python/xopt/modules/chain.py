"""Steps of a program that follow each other and are one operator call each, as one call of an operator.

A call from Python costs as much as a convolution of a small image. What a step's call is depends on its modules alone:
`chainable` says how it is told. It is asked once; what it has looked at (`Seen`) is watched natively from then on, and
asked for again when any of it has changed. A chain whose calls cannot be told (a weight that is no longer packed), or
that somebody watches (a profiler, a dispatch mode), runs step by step. Which steps of a graph are chains says
`chain_graph.py`; views between them (`views.py`) are steps as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.fx import Node

from xopt import _C, ops  # noqa: F401 - loads them
from xopt.modules import channels_last
from xopt.modules.chain_call import Call as Call
from xopt.modules.chain_call import Expected, Fitting
from xopt.modules.chain_call import Shape as Shape
from xopt.modules.chain_call import Value as Value
from xopt.modules.counted_parameter import asking_quickly, count_changes
from xopt.ops.chain import (
    Computed,
    Given,
    Number,
    Part,
    Result,
    SizeOf,
    call_text,
    calls_text,
    number_of,
    with_values,
)

Tensor = torch.Tensor


class _Natively(threading.local):
    """Whether this thread wants chains to be run natively or not at all."""

    on = False


class NotNative(Exception):
    """A chain that cannot."""


natively = _Natively()
_chain = torch.ops.xopt.chain.default._op  # without a call of Python's that leads to it
ANY_DIMS = 0
_OWN = -1  # the place of vectors that a chain has made
_LINE = 16  # floats in a line of the CPU's caches
_MOST_SKIPPED = 63  # calls of a chain, before it is told anew what could not be told


class Stored(NamedTuple):
    """A module of the program's, or a parameter or buffer of it."""

    path: str
    name: str = ""


class Linkable(NamedTuple):
    """How a kind of step is a link of chains."""

    tell: Callable[..., Call | list[Call] | None]
    where: Callable[[Node], bool]
    has_parts: bool
    is_view: bool
    takes_images: bool
    is_torchs: bool
    channels_last: Callable[[Node], bool | None]
    is_row_major: Callable[[Node], bool]


Teller = TypeVar("Teller", bound=Callable[..., Call | list[Call] | None])
linkables: dict[Any, Linkable] = {}


def always(node: Node) -> bool:
    return True


def chainable(
    *steps: Any,
    where: Callable[[Node], bool],
    has_parts: bool = False,
    is_view: bool = False,
    takes_images: bool = False,
    is_torchs: bool = False,
    channels_last: Callable[[Node], bool | None] = lambda node: False,
    is_row_major: Callable[[Node], bool] = lambda node: False,
) -> Callable[[Teller], Teller]:
    """Marks the function that tells what call of an operator a step is, or None where it is none: it takes a `Seen` and
    then the step's arguments. Of those, modules are themselves and tensors `Given` or `Result`, but `Stored` those of
    modules that are in tuples. What a step of several tensors (`has_parts`) gives are the results of its call, or those
    of a list of calls.

    `where`: which of a graph's steps are worth asking for. `is_view`: it computes nothing. `takes_images`: how its
    input lies in memory makes a difference, so that it must be a link's result, or have its channels last as that has.
    `is_torchs`: by itself it stays torch's, which is as quick; no chain is made of nothing but such. `channels_last`:
    whether an image has its channels last in this view; None: if its source has. `is_row_major`: whether
    the result is contiguous whatever is given."""

    def mark(teller: Teller) -> Teller:
        for step in steps:
            linkables[step] = Linkable(
                teller, where, has_parts, is_view, takes_images, is_torchs, channels_last, is_row_major
            )
        return teller

    return mark


class Seen:
    """What is looked at to tell the calls of a chain, which `operands` then watches, and the tensors that they take."""

    def __init__(self, modules: list[nn.Module], given: int) -> None:
        self.operands = _C.Operands()
        self.calls: list[Call] = []
        self.expected: list[Expected] = []
        self.shapes: dict[Value, Shape] = {}
        """Of operands that stand where a step has a tensor."""
        self.parts = 0
        """How many of the step's parts are wanted, counted from the first."""
        self.lasts = True
        """Whether all of it can be watched."""
        self._vectors: list[Tensor] = []
        self._vector_elements = 0
        self._modules = modules
        self._places = {id(module): place for place, module in enumerate(modules)}
        self._tensors = given

    def call(self, call: Call) -> Result:
        """A call that comes before those of the step itself, and its result."""
        self.calls.append(call)
        return Result(len(self.calls) - 1)

    def expect(self, function: Callable[[Any, Any], Any], left: Number, right: Number, outcome: Any) -> None:
        """What a comparison of numbers has to say before the calls that come then are looked at."""
        self.expected.append(Expected(len(self.calls), function, left, right, outcome))

    def attribute(self, module: nn.Module, name: str) -> Any:
        value = getattr(module, name)
        value = list(value) if type(value) is list else value
        self.operands.expect_attribute(self._places[id(module)], name, value)
        return value

    def tensor(self, module: nn.Module, name: str) -> Tensor | None:
        """A parameter or buffer that something is computed from."""
        found: Tensor | None = getattr(module, name)
        count_changes(found)
        counted = found is not None and not found.is_inference()
        self.lasts &= found is None or counted
        version = found._version if found is not None and counted else -1
        self.operands.expect_tensor(self._places[id(module)], name, found, version)
        return found

    def stored(self, tensor: Stored | None) -> Tensor | None:
        """The same by its path."""
        return None if tensor is None else self.tensor(self.holder(tensor), tensor.name)

    def holder(self, tensor: Stored) -> nn.Module:
        return self._modules[0].get_submodule(tensor.path)

    def operand(self, tensor: Stored) -> Given | None:
        """One that the operator takes."""
        module = self.holder(tensor)
        given = self.parameter(module, tensor.name)
        if given is not None:
            self.shapes[given] = tuple(getattr(module, tensor.name).shape)
        return given

    def value(self, argument: Value | Stored) -> Value | None:
        """Whatever a step has where an operator takes a tensor."""
        return self.operand(argument) if isinstance(argument, Stored) else argument

    def values(self, arguments: Sequence[Value | Stored]) -> list[Value] | None:
        """The same of several; None: one of them is none."""
        values = [value for value in map(self.value, arguments) if value is not None]
        return values if len(values) == len(arguments) else None

    def parameter(self, module: nn.Module, name: str) -> Given | None:
        """A parameter or buffer that the operator takes."""
        found = module._parameters[name] if name in module._parameters else module._buffers[name]
        if found is None:
            self.tensor(module, name)
            return None
        self.operands.take_tensor(self._places[id(module)], name, found)
        return self._next()

    def packed(self, module: nn.Module, name: str, packed: Tensor) -> Given:
        """What a packed parameter lies in, which the operator takes."""
        self.operands.take_packed(self._places[id(module)], name, packed)
        return self._next()

    def own(self, tensor: Tensor | None) -> Given | Part | None:
        """A tensor for the operator that was computed from what was looked at. Vectors are parts of one tensor: to hand
        over one for each layer takes as long as a layer of a small image."""
        if tensor is None:
            return None
        if tensor.dtype != torch.float32 or tensor.dim() != 1:
            self.operands.take(tensor)
            return self._next()
        begin = self._vector_elements
        with torch.no_grad():
            self._vectors.append(nn.functional.pad(tensor, (0, -len(tensor) % _LINE)))
        self._vector_elements += len(self._vectors[-1])
        return Part(_OWN, begin, begin + len(tensor))  # whose place is not known before the last

    def text(self, returned: Sequence[Result]) -> str:
        """All calls. To be asked for last."""
        place = _OWN
        if self._vectors:
            with torch.no_grad():
                self.operands.take(torch.cat(self._vectors))
            place = self._next().place

        def line(call: Call) -> str:
            def told(argument: Any) -> Any:
                is_own = isinstance(argument, Part) and argument.place == _OWN
                return argument._replace(place=place) if is_own else argument

            return call_text(call.op, tuple(map(told, call.arguments)))

        return calls_text([line(call) for call in self.calls], returned)

    def _next(self) -> Given:
        self._tensors += 1
        return Given(self._tensors - 1)


class Link(NamedTuple):
    """A step of a chain. Its `Result`s are those of links before it."""

    step: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parts: int
    """How many of several that it gives are wanted, counted from the first."""


class Settled(NamedTuple):
    """A chain's calls, for as long as nothing has changed that was looked at to tell them."""

    operands: _C.Operands
    text: str
    images: list[tuple[int, int, bool | None]]
    """Values that have to be images: their places, dimensions, and whether any layout will do."""
    fitting: Fitting | None
    """Whether what has to be alike is; None: there is no such thing."""


class Chain:
    """The step of a program that is several: called with the program's modules and the values from outside."""

    def __init__(self, links: tuple[Link, ...], returned: list[Result]) -> None:
        self._links = links
        self._returned = returned
        self._unused_after = _unused_after(links, returned)
        self._settled: Settled | None = None
        self._skipped, self._to_skip = 0, 0
        self._places: dict[str, int] = {}

    def run(self, modules: list[nn.Module], *values: Tensor) -> Sequence[Tensor]:
        settled = self._settled
        if not is_watched():
            tensors = None if settled is None else _gathered(settled, modules, values)
            if tensors is None and not natively.on and not self._is_in_vain():
                settled = self._settled = self._settle(modules, len(values))
                tensors = None if settled is None else _gathered(settled, modules, values)
                self._to_skip = min(2 * self._to_skip + 1, _MOST_SKIPPED) if tensors is None else 0
            if tensors is not None and settled is not None and _fits(settled, values):
                return _chain(tensors, settled.text)  # type: ignore[no-any-return]
        if natively.on:
            raise NotNative
        return self._step_by_step(modules, values)

    def _is_in_vain(self) -> bool:
        """Calls that could not be told are not asked for each time: more and more calls of the chain go by between."""
        self._skipped = (self._skipped + 1) % (self._to_skip + 1)
        return self._skipped != 0

    def _place_of(self, modules: list[nn.Module], path: str) -> int:
        """Of a module in its program's list, which has them in the same order in all calls."""
        if path not in self._places:
            module = modules[0].get_submodule(path)
            self._places[path] = next(place for place, each in enumerate(modules) if each is module)
        return self._places[path]

    def _settle(self, modules: list[nn.Module], given: int) -> Settled | None:
        """None: its calls cannot be told, or not for longer than this one."""
        seen = Seen(modules, given)
        results: list[list[Result]] = []  # of each link

        def told(argument: Any, inside: bool) -> Any:
            if isinstance(argument, Result):
                return results[argument.number][argument.part]
            if isinstance(argument, Stored) and not argument.name:
                return modules[0].get_submodule(argument.path)
            return seen.operand(argument) if isinstance(argument, Stored) and not inside else argument

        for link in self._links:
            args, kwargs = _mapped(link, told)
            seen.parts = link.parts
            calls = linkables[link.step].tell(seen, *args, **kwargs)
            if calls is None or not seen.lasts:
                return None
            if isinstance(calls, Call):
                number = seen.call(calls).number
                results.append([Result(number), Result(number, 1)])
            else:
                results.append([seen.call(call) for call in calls])
        returned = [results[each.number][each.part] for each in self._returned]
        if any(call.image_dims is not None and call.input in seen.shapes for call in seen.calls):
            return None  # a parameter as an image
        text = seen.text(returned)
        images = [
            (call.input.place, call.image_dims, call.any_layout)
            for call in seen.calls
            if isinstance(call.input, Given) and call.image_dims is not None
        ]
        depends = seen.expected or any(call.alike is not None or call.fits is not None for call in seen.calls)
        fitting = Fitting(seen.calls, seen.shapes, seen.expected) if depends else None
        return Settled(seen.operands, text, images, fitting)

    def _step_by_step(self, modules: list[nn.Module], values: Sequence[Tensor]) -> Sequence[Tensor]:
        results: list[Any] = []

        def value(argument: Any, inside: bool) -> Any:
            if isinstance(argument, Given):
                return values[argument.place]
            if isinstance(argument, Result):
                return _part(self._links[argument.number], results[argument.number], argument.part)
            if isinstance(argument, (SizeOf, Computed)):
                return number_of(argument, lambda tensor, dim: tensor.size(dim))  # whose values have been put in
            if isinstance(argument, Stored):
                module = modules[self._place_of(modules, argument.path)]
                return getattr(module, argument.name) if argument.name else module
            return argument

        for link, unused in zip(self._links, self._unused_after, strict=True):
            args, kwargs = _mapped(link, value)
            step = getattr(torch.Tensor, link.step) if isinstance(link.step, str) else link.step
            results.append(step(*args, **kwargs))
            for number in unused:
                results[number] = None
            del args, kwargs
        return [_part(self._links[each.number], results[each.number], each.part) for each in self._returned]


def _unused_after(links: Sequence[Link], returned: Sequence[Result]) -> list[list[int]]:
    """For each link the links whose results nobody wants once it has run."""
    last: dict[int, int] = {}

    def note(value: Any, inside: bool) -> None:
        if isinstance(value, Result):
            last[value.number] = place

    for place, link in enumerate(links):
        last[place] = place
        _mapped(link, note)
    unused: list[list[int]] = [[] for _ in links]
    for number in last.keys() - {each.number for each in returned}:
        unused[last[number]].append(number)
    return unused


def _part(link: Link, result: Any, part: int) -> Any:
    return result[part] if linkables[link.step].has_parts else result


def _mapped(link: Link, change: Callable[[Any, bool], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a link with their values changed. `change` is told whether a value is in a tuple."""
    args = tuple([_map(each, change, False) for each in link.args])
    return args, {name: _map(each, change, False) for name, each in link.kwargs.items()}


_VALUES = frozenset({Given, Result, Stored})


def _map(argument: Any, change: Callable[[Any, bool], Any], inside: bool) -> Any:
    kind = type(argument)
    if kind in _VALUES:
        return change(argument, inside)
    if kind is SizeOf or kind is Computed:
        return change(with_values(argument, lambda value: change(value, False)), inside)
    if kind is tuple:
        return tuple([_map(each, change, True) for each in argument])
    if kind is slice:
        return slice(*[_map(each, change, True) for each in (argument.start, argument.stop, argument.step)])
    return argument


def _gathered(settled: Settled, modules: list[nn.Module], values: tuple[Tensor, ...]) -> list[Tensor] | None:
    with asking_quickly():
        return settled.operands.gather(modules, values)


def is_watched() -> bool:
    """Whether somebody sees each operator that is called."""
    return torch.autograd.profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0


def _fits(settled: Settled, values: Sequence[Tensor]) -> bool:
    for place, dims, any_layout in settled.images:
        value = values[place]
        if dims != ANY_DIMS and value.dim() != dims:
            return False
        if value.stride(1) != 1 and not (channels_last.is_inside() if any_layout is None else any_layout):
            return False
        if value.dim() == 3 and channels_last.answers_as_torch():
            return False
    return settled.fitting is None or settled.fitting.holds(tuple([value.shape for value in values]))
