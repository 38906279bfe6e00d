"""Runs a graph: as a Python function made from it, guarded against whatever has changed in the module since.

A program refers to its modules by weak references, since its module owns it: a cycle would keep a dropped model's
memory until the garbage collector came round.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Graph, Node

from xopt import _C
from xopt.graph.hooks import are_awake, have_sleeping_hooks
from xopt.graph.record import Recorder
from xopt.graph.steps import OtherSizes, expect
from xopt.graph.watch import OWN_ATTRIBUTES, is_compared, watch

MODULES = "*"  # as an attribute's name in a graph: the list of all modules, by their places
# Of a comparison as it is written: to call a function takes as long as to compare ten sizes.
_SIGNS: dict[Any, str] = {
    **{operator.eq: "==", operator.ne: "!=", operator.lt: "<"},
    **{operator.le: "<=", operator.gt: ">", operator.ge: ">="},
}
_SIMPLE = (type(None), bool, int, str, type(Ellipsis))


class Program:
    def __init__(self, root: nn.Module, recorder: Recorder, is_direct: bool = False) -> None:
        self._guard = Guard(root, recorder)
        self.has_effects = recorder.has_effects
        self.is_direct = is_direct
        """Whether it looks at nothing that a whole model's forward sets up (modules/direct.py)."""
        self._has_sleeping_hooks = have_sleeping_hooks([part for part in root.modules() if part is not root])
        self._run = generate(recorder.graph, self._guard.index)

    def may_run(self) -> bool:
        """Whether no hook inside has been woken by somebody else."""
        return not self._has_sleeping_hooks or not are_awake()

    def __call__(self, root: nn.Module, values: list[Any]) -> Any:
        """The result, or NotImplemented where the module is no longer what was recorded. Raises OtherSizes where the
        recording does not hold for these sizes."""
        modules = self._guard(root)
        return NotImplemented if modules is None else self._run(modules, *values)


EPOCH = _C.ModuleGuard.EPOCH  # in a block's __dict__: how often its attributes have been set


class Guard:
    """Finds the modules below a root, and sees whether one of them was exchanged, changed or hooked, or anything else
    that the forwards read (`watch.py`)."""

    def __init__(self, root: nn.Module, recorder: Recorder) -> None:
        self.index: dict[str, int] = {}
        self._modules = _C.ModuleGuard(root.__dict__.get(EPOCH, 0))
        places: dict[int, int] = {}
        modules: list[tuple[int, nn.Module]] = []
        for path, module in root.named_modules(remove_duplicate=False):
            self.index[path] = places[id(module)] if id(module) in places else len(places)
            if id(module) in places:
                continue
            places[id(module)] = self.index[path]
            modules.append((self.index[path], module))
            if path:
                parent, _, name = path.rpartition(".")
                self._modules.add(self.index[parent], name, weakref.ref(module), module.__dict__.get(EPOCH, 0))
            for name, value in module.__dict__.items():
                if is_compared(value) and name not in OWN_ATTRIBUTES:
                    self._modules.add_container(self.index[path], name, snapshot(value))
        watch(self._modules, modules, recorder.surroundings)
        self._computed = [each for each in recorder.watched if not _is_stored(*each)]
        for holder, name, value in recorder.watched:
            if _is_stored(holder, name, value):
                self._modules.add_watched(holder, name, value)

    def __call__(self, root: nn.Module) -> list[nn.Module] | None:
        modules = self._modules(root)
        for holder, name, value in self._computed:
            if getattr(holder, name, None) != value:
                return None
        return modules


def _is_stored(holder: Any, name: str, value: Any) -> bool:
    """Whether an attribute is what stands in the object's __dict__: a configuration's own way to it may be long."""
    stored = getattr(holder, "__dict__", None)
    return type(stored) is dict and name in stored and stored[name] is value


def snapshot(value: Any) -> Any:
    """A copy of a plain container that can be compared with it later."""
    kind = type(value)
    if kind is dict:
        return {name: snapshot(item) for name, item in value.items()}
    return kind(map(snapshot, value)) if kind in (list, tuple, set, frozenset) else value


def generate(graph: Graph, index: dict[str, int]) -> Callable[..., Any]:
    """The function `f(modules, *values)` of a graph. A value is dropped after its last use, as the source would."""
    bound: dict[str, Any] = {}
    nodes = list(graph.nodes)
    last_use = {user: node for node in nodes for user in node.all_input_nodes}
    dying: dict[Node, list[str]] = {}
    for node, last in last_use.items():
        dying.setdefault(last, []).append(node.name)
    arguments = [node.name for node in nodes if node.op == "placeholder"]
    lines = [f"def program({', '.join(['__modules', *arguments])}):"]
    for node in nodes:
        statement = _statement(node, index, bound)
        if statement:
            lines.append("    " + statement)
        names = dying.get(node, [])
        if names and node.op != "output":
            lines.append(f"    {' = '.join(names)} = None")
    exec("\n".join(lines), bound)
    function: Callable[..., Any] = bound["program"]
    return function


def _statement(node: Node, index: dict[str, int], bound: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return _text(value, bound)

    arguments = [text(value) for value in node.args] + [f"{name}={text(value)}" for name, value in node.kwargs.items()]
    if node.op == "placeholder":
        return ""
    if node.op == "output":
        return f"return {text(node.args[0])}"
    if node.op == "get_attr":
        if node.target == MODULES:
            return f"{node.name} = __modules"
        path, _, name = str(node.target).partition(":")
        place = f"__modules[{index[path]}]"
        if name:
            return f"{node.name} = {place}._parameters.get({name!r}, {place}._buffers.get({name!r}))"
        return f"{node.name} = {place}"
    if node.op == "call_method":
        return f"{node.name} = {arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    if node.target is operator.getitem:
        return f"{node.name} = {arguments[0]}[{arguments[1]}]"
    if node.target is expect and node.args[0] in _SIGNS:
        _, left, right, outcome = arguments
        return f"if ({left} {_SIGNS[node.args[0]]} {right}) != {outcome}: raise {_bind(OtherSizes, bound)}"
    return f"{node.name} = {_bind(node.target, bound)}({', '.join(arguments)})"


def _text(value: Any, bound: dict[str, Any]) -> str:
    kind = type(value)
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (tuple, list, dict, slice)):
        if isinstance(value, slice):
            return f"slice({_text(value.start, bound)}, {_text(value.stop, bound)}, {_text(value.step, bound)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name!r}: {_text(item, bound)}" for name, item in value.items()) + "}"
        items = "".join(_text(item, bound) + ", " for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if kind in _SIMPLE:
        return "..." if value is Ellipsis else repr(value)
    return _bind(value, bound)


def _bind(value: Any, bound: dict[str, Any]) -> str:
    """A name for a value that has no literal."""
    for name, known in bound.items():
        if known is value:
            return name
    name = f"__constant_{len(bound)}"
    bound[name] = value
    return name
