"""Records what a module's forward computes, by running that forward on symbols in place of tensors.

No part of torch is patched: a `Symbol` answers torch's functions through `__torch_function__`, and knows an example of
its value, so that dtypes and numbers of dimensions are real while sizes stay symbols. Where a forward branches on a
size or on what its arguments say, or needs a size's number, that is recorded as an expectation, which other calls have
to meet. Whatever cannot be said so (a branch on what a layer has computed, an object that nobody has explained) ends
the recording with `CannotRecord`, and the module keeps its own forward.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from xopt.graph.autocast import is_own, without_autocast
from xopt.graph.branch import has_dtype, is_told_by_arguments, truth
from xopt.graph.casts import dtype_asked_for, was_widened
from xopt.graph.changes import Changes
from xopt.graph.constants import Constants, are_same, values_in
from xopt.graph.held import Held
from xopt.graph.late import EFFECT, ask_first, hand_over_what_is_left, set_at_the_end
from xopt.graph.native import native, unwatched
from xopt.graph.parts import EXAMPLE as EXAMPLE
from xopt.graph.parts import has_length, length_follows_sizes, name_of
from xopt.graph.results import mapped, returned
from xopt.graph.signature import by_place, fill, is_tensor, signature
from xopt.graph.state import DRAWS, State, Surroundings, collector_paused, left_behind
from xopt.graph.steps import KIND, call_plainly, description_of, expect
from xopt.graph.symbol import (
    CannotRecord,
    SizeSymbol,
    Symbol,
    SymbolicSize,
    is_symbol,
    opaque_reads,
    without_writing,
    writes,
)
from xopt.graph.symbol import active as active
from xopt.graph.weights import WeightsToo


class ChangesItself(CannotRecord):
    """A forward changes what its next call finds. Once that is what it would be changed to (numbers that are set anew,
    a table that is filled when something is first asked for), it can be recorded."""


_CONSTANT_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.Tensor.is_floating_point)

in_floats: dict[Any, Callable[..., Any]] = {}
"""By function: what computes it in fp32 under autocast, where a forward has itself made its first argument fp32."""

WITHOUT_AUTOCAST = "without autocast"  # of a step in a part of a forward that turned it off

told_by_result: set[Any] = set()
"""Functions of which patterns see at a result in fp32 that they were so computed under autocast."""


class Recorder:
    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.graph = Graph()
        self._autocasts = torch.is_autocast_enabled("cpu")
        self._paths = {id(module): path for path, module in root.named_modules()}
        self._tensors: dict[int, tuple[str, str]] = {}
        for path, module in root.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._tensors.setdefault(id(tensor), (path, name))
        self._attributes: dict[tuple[str, str], Node] = {}
        self.changes = Changes()
        self.watched: list[tuple[Any, str, Any]] = []
        self.surroundings = Surroundings([], [], set())
        self._random_state = torch.get_rng_state()
        self._expected: set[tuple[Any, Any, Any]] = set()
        self.has_effects = False
        self._late: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self.refusal: str | None = None
        """Why this is no recording, which the forward may have caught."""
        self.kept: dict[Any, Any] = {}
        """For rules of objects that are no tensors: what they know of one during this recording."""
        self.constants = Constants()
        self.held = Held(root)
        self._constant_nodes: dict[int, Node] = {}
        self.given: dict[Node, torch.Tensor] = {}
        """Tensors of the recorded call, by the steps that stand for them."""
        self.symbols: list[weakref.ref[Symbol]] = []
        """All that were made."""

    # ---- What forwards lead to ---------------------------------------------------------------------------------------

    @unwatched
    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_place(args, kwargs)
        if function in _CONSTANT_FUNCTIONS:
            return function(*self.examples(args))
        if function is torch.nn.functional.dropout and kwargs.get("training") is False:
            return args[0]
        if kwargs.get("inplace") is True:
            return self.changes.in_place(function, *args, **{**kwargs, "inplace": False})
        if kwargs.get("out") is not None:
            raise CannotRecord("it has a result written to a tensor of its own")
        name = getattr(function, "__name__", "")
        if writes(name):
            return self.changes.in_place(without_writing(name), *args, **kwargs)
        first = next((each for each in args if type(each) is Symbol), None)
        asks_for_floats = is_own() and was_widened(first)
        if asks_for_floats and function in in_floats:
            function = in_floats[function]
        with self._noting_errors(), without_autocast(asks_for_floats and function in told_by_result):
            example = self.evaluate(function, args, kwargs)
        is_method = getattr(torch.Tensor, name, None) is function  # also where a parameter stands left of the operator
        op, target = ("call_method", name) if is_method else ("call_function", function)
        result = self.record(op, target, args, kwargs, example)
        narrow = dtype_asked_for(function, args) if is_own() else None
        return result if narrow is None else result.to(narrow)

    @unwatched
    def evaluate(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What a function gives in the recorded call."""
        args, kwargs = self.examples(args), self.examples(kwargs)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            tensors = (each for each in values_in((args, kwargs)) if isinstance(each, torch.Tensor))
            before = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
            example = function(*args, **kwargs)
            if any(tensor._version != version for tensor, version in before):
                raise CannotRecord("it changes a tensor in place")
        return example

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Those that the forward may catch: other calls need not raise."""
        try:
            yield
        except Exception as problem:
            self.refuse(f"{type(problem).__name__}: {problem}")
            raise

    def refuse(self, problem: str) -> None:
        """Whatever the forward makes of it, this ends in no graph."""
        self.refusal = self.refusal or problem

    def call_module(self, module: nn.Module, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A function of a module of ours and of more arguments, as one step."""
        if id(module) not in self._paths:
            raise CannotRecord(f"it calls a {type(module).__name__} that is no part of it")
        with self._noting_errors(), torch.no_grad(), torch._C.DisableTorchFunction():
            example = function(module, *self.examples(args), **self.examples(kwargs))
        return self.record("call_function", function, (module, *args), kwargs, example)

    def call_with_weights(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """A block that is given no symbol but sizes. What it makes of parameters and buffers alone (a table of relative
        positions) is a step of its own, which calls it."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        own = tensors or any(self.knows(tensor) for tensor in (*module._parameters.values(), *module._buffers.values()))
        if not own or not all(self.knows(tensor) for tensor in tensors):
            return forward(module, *args, **kwargs)
        active.recorder = None
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                example = forward(module, *self.examples(args), **self.examples(kwargs))
        finally:
            active.recorder = self
        return self.record("call_function", call_plainly, (module, *args), kwargs, example)

    @unwatched
    def record(self, op: str, target: Any, args: Any, kwargs: Any, example: Any) -> Any:
        node = self.graph.create_node(op, target, self.nodes(args), self.nodes(kwargs))
        node.meta[EXAMPLE] = description_of(example)
        if self._autocasts and not torch.is_autocast_enabled("cpu"):
            node.meta[WITHOUT_AUTOCAST] = True
        if type(example) in (tuple, list) and length_follows_sizes(node):
            self._expect(has_length, (node, len(example)), True)
        return self._wrap(node, example)

    @unwatched
    def effect(self, op: str, target: Any, args: Any, kwargs: Any, example: Any = None) -> Any:
        """A step that changes an object."""
        self.has_effects = True
        node = self.graph.create_node(op, target, self.nodes(args), self.nodes(kwargs))
        node.meta.update({EXAMPLE: description_of(example), EFFECT: True})
        return None if example is None else self._wrap(node, example)

    def set_late(self, symbol: Any, name: str, value: Any) -> None:
        """What an attribute of an object is to be after the call."""
        self.call_late((symbol._node, name), setattr, (symbol._node, name, value))

    def call_late(self, key: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """What is to be done to an object after all else, in place of what was to be under this key."""
        self._late[key] = function, args

    def do_late_settings(self) -> None:
        """Now, since somebody wants to know of them."""
        for function, args in self._late.values():
            self.effect("call_function", function, args, {})
        self._late.clear()

    def read(self, symbol: Any, name: str) -> Any:
        """An attribute of an object that is no tensor, whatever it is."""
        example = getattr(symbol._example, name)
        node = self.graph.call_function(getattr, (symbol._node, name))
        node.meta[EXAMPLE] = description_of(example)
        return Symbol(self, node, example)

    def read_constant(self, symbol: Any, name: str) -> Any:
        """What a program takes for granted of such an object: a flag, or a list of them."""
        constant = self.read(symbol, name)
        self._expect(operator.eq, (constant._node, constant._example), True)
        return copy.copy(constant._example)

    def expect(self, function: Any, left: Any, right: Any) -> Any:
        """What a comparison of sizes says in the recorded call, and has to say in others."""
        outcome = function(*self.examples((left, right)))
        if not isinstance(outcome, bool):
            raise CannotRecord(f"it compares a size with a {type(right).__name__}")
        self._expect(function, self.nodes((left, right)), outcome)
        return outcome

    def expect_no_attribute(self, symbol: Symbol, name: str) -> bool:
        """Whether what the forward was given lacks an attribute, as it then has to in other calls."""
        given = self.given.get(symbol._node)
        if given is None or hasattr(given, name):
            return False
        self._expect(hasattr, (symbol._node, name), False)
        return True

    def expect_dtype(self, symbol: Symbol) -> None:
        """Of a tensor that an object holds, whose kind the call's signature does not tell."""
        self.expect(has_dtype, symbol, symbol._example.dtype)

    def expect_truth(self, symbol: Symbol) -> bool:
        """The same of a tensor of one value, on which a forward branches."""
        example: torch.Tensor = symbol._example
        if example.numel() != 1 or not is_told_by_arguments(symbol._node):
            symbol._refuse("a branch")
        with torch._C.DisableTorchFunction():
            outcome = bool(example)
        self._expect(truth, (symbol._node, None), outcome)
        return outcome

    @unwatched
    def _expect(self, function: Any, nodes: tuple[Any, Any], outcome: bool) -> None:
        key = (function, *(node if isinstance(node, Node) else repr(node) for node in nodes))
        if key not in self._expected:
            if self.has_effects:  # a call that turned out to be another one could not be begun again
                raise CannotRecord("it depends on a size or a value after it has changed an object")
            self.graph.call_function(expect, (function, *nodes, outcome))
            self._expected.add(key)

    def watch(self, holder: Any, name: str) -> None:
        """What is recorded holds as long as this attribute keeps its value."""
        if not any(known is holder and its == name for known, its, _ in self.watched):
            self.watched.append((holder, name, getattr(holder, name, None)))

    def examples(self, value: Any) -> Any:
        return mapped(value, lambda item: item._example if is_symbol(item) else item)

    def knows(self, value: Any) -> bool:
        """Whether this is a parameter or a buffer of the block."""
        return id(value) in self._tensors

    def has_drawn(self) -> bool:
        """Whether there are random numbers among what the forward has made."""
        return not torch.equal(torch.get_rng_state(), self._random_state)

    def symbol_of(self, tensor: torch.Tensor) -> Any:
        """A parameter or a buffer of the block as a symbol; another tensor as it is."""
        if not self.knows(tensor):
            return tensor
        with torch._C.DisableTorchFunction():
            return Symbol(self, self._node(tensor), tensor.detach())

    # ---- Between symbols and nodes -----------------------------------------------------------------------------------

    def _wrap(self, node: Node, example: Any) -> Any:
        kind = type(example)
        if kind is int:
            return SizeSymbol(self, node, example)
        if isinstance(example, torch.Tensor) or kind is float:
            return Symbol(self, node, example)
        if kind in (tuple, list, torch.Size) or kind.__module__ == torch.return_types.__name__:
            items: list[Any] = []
            for index, item in enumerate(example):
                if item is None:
                    items.append(None)
                    continue
                part = self.graph.call_function(operator.getitem, (node, index))
                part.meta[EXAMPLE] = description_of(item)
                items.append(self._wrap(part, item))
            return SymbolicSize(items) if kind is torch.Size else kind(items)
        if any(isinstance(example, known) for known, _ in opaque_reads):
            return Symbol(self, node, example)
        raise CannotRecord(f"{node.target} gives a {kind.__name__}")

    def nodes(self, value: Any) -> Any:
        return mapped(value, self._node)

    def _node(self, value: Any) -> Any:
        if is_symbol(value):
            if value._recorder is not self:
                raise CannotRecord("it keeps a tensor from another recording")
            return value._node
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and value.ndim == 0 and value.is_cpu and not self.knows(value):
                if self.has_drawn():
                    raise CannotRecord("it makes a tensor of its own, and random numbers")
                if not self.constants.is_of_numbers(value):
                    return value if self.constants.find(value) is None else self._constant(value)
                with torch._C.DisableTorchFunction():
                    return value.clone()  # made of numbers, which are constants as well; the forward may change it
            if id(value) not in self._tensors:
                return self._constant(value)
            node = self._attribute(*self._tensors[id(value)], description_of(value))
            node.meta[KIND] = type(value)
            return node
        if isinstance(value, nn.Module):
            return self._attribute(self._paths[id(value)], "", value)
        return value

    def _constant(self, tensor: torch.Tensor) -> Node:
        """The step that reads a tensor that a module holds, or makes one that the forward has made of numbers."""
        if tensor in self.held:
            node = self.held.node(self.graph, tensor)
            node.meta[EXAMPLE] = description_of(tensor)
            return node
        made = self.constants.find(tensor)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if made is None or not are_same(
                made.function(*self.examples(made.args), **self.examples(made.kwargs)), tensor
            ):
                raise CannotRecord("it makes a tensor of its own, or reads one that is no part of it")
        args, kwargs = self.nodes(made.args), self.nodes(made.kwargs)
        if id(tensor) not in self._constant_nodes:
            name = name_of(made.function)
            is_method = getattr(torch.Tensor, name, None) is made.function
            op, target = ("call_method", name) if is_method else ("call_function", made.function)
            node = self.graph.create_node(op, target, args, kwargs)
            node.meta[EXAMPLE] = description_of(tensor)
            self._constant_nodes[id(tensor)] = node
        return self._constant_nodes[id(tensor)]

    def _attribute(self, path: str, name: str, example: Any) -> Node:
        """The node of a module (no name), a parameter or a buffer."""
        if (path, name) not in self._attributes:
            first = next(iter(self.graph.nodes), None)
            with self.graph.inserting_before(first):
                node = self.graph.create_node("get_attr", f"{path}:{name}")
            node.meta[EXAMPLE] = example
            self._attributes[path, name] = node
        return self._attributes[path, name]

    def finish(self, result: Any) -> None:
        self.changes.check(self.graph)
        ask_first(self.graph, expect)
        made = self.nodes(returned(self, result))
        set_at_the_end(self.graph, [(function, self.nodes(args)) for function, args in self._late.values()])
        self._late.clear()
        self.graph.output(made)
        hand_over_what_is_left(self.graph)


def record(root: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder:
    """With the graph of `forward(root, *args, **kwargs)`; its placeholders are the values of the call's signature."""
    recorder = Recorder(root)
    _, values = signature(args, kwargs)
    symbols = []
    for index, value in enumerate(values):
        example = value.detach().clone() if is_tensor(value) else value
        node = recorder.graph.placeholder(f"value_{index}")
        node.meta[EXAMPLE] = description_of(example)
        if is_tensor(value):
            recorder.given[node] = value
        symbols.append(Symbol(recorder, node, example))
    args, kwargs = fill(args, symbols), fill(kwargs, symbols)
    state = State(root, [args, kwargs])
    outer, active.recorder = active.recorder, recorder
    try:
        with (
            collector_paused(),
            torch.random.fork_rng(devices=[]),
            native.watch(state.see_call, state.see_return),
            WeightsToo(recorder),
        ):
            result = forward(root, *args, **kwargs)
    finally:
        active.recorder = outer
        changed = state.restore()
    if recorder.refusal is not None:
        raise CannotRecord(recorder.refusal)
    if changed is not None:
        raise (CannotRecord if changed == DRAWS else ChangesItself)(f"{changed} in its forward")
    recorder.surroundings = state.surroundings()
    recorder.finish(result)
    recorder.kept.clear()
    recorder.constants.clear()
    recorder.held.clear()
    recorder.given.clear()
    del result, args, kwargs, state
    if left_behind(recorder.symbols):
        raise CannotRecord("it leaves a tensor where the next call could find it")
    return recorder
