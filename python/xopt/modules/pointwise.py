"""Arithmetic on each value that nothing else has taken along (activations behind sums and splits, products with
numbers, casts between), several steps at a time in one pass over memory, and as links of chains.

Steps of one shape that lead to one result are one call. What lies between them is not rounded, and neither are casts
from one floating dtype to another there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from xopt.modules.activation import ACTIVATIONS, plain_activation
from xopt.modules.cast import write_rounded
from xopt.modules.chain import Call, Seen, Value, always, chainable
from xopt.modules.chain_graph import is_part, kind_of
from xopt.modules.combine import are_broadcast, broadcast, combined, relu_of_sum
from xopt.modules.fixed_dtype import names_a_dtype
from xopt.modules.pattern import (
    ADD,
    DIVIDE,
    MULTIPLY,
    SUBTRACT,
    Pattern,
    argument,
    dtype_of,
    is_call,
    is_cast,
    operands,
    put_in_place,
    shape_of,
    step,
)
from xopt.ops.fakes import FLOATING
from xopt.ops.pointwise import MOST_INPUTS, MOST_STEPS

# Values of several steps or one, up to which an operator costs more than torch's; and up to which, outside of chains,
# several steps are better left as they were (a loop over time).
_FEW, _FEW_OF_ONE = 8192, 65536
_FEW_APART = 32768
_MOST_DIMS = 8  # that the operator knows
_pointwise = torch.ops.xopt.pointwise.default

PLAIN: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "softplus": functional.softplus,
}
_BINARY = {"add": ADD, "sub": SUBTRACT, "mul": MULTIPLY, "div": DIVIDE}
_POWER = (operator.pow, torch.pow, "pow", "__pow__")
_UNARY = {
    "abs": (torch.abs, "abs"),
    "sqrt": (torch.sqrt, "sqrt"),
    "exp": (torch.exp, "exp"),
    "softplus": (functional.softplus,),
}


class _Step(NamedTuple):
    how: str
    of: tuple[Any, ...]
    """Nodes, numbers, or `_LAST`."""
    numbers: tuple[float, ...] = ()


_LAST = object()
"""What the step before, of the same node, has given."""


# ---- What runs -------------------------------------------------------------------------------------------------------


def computed(inputs: Sequence[Tensor], steps: str) -> Tensor:
    """By torch; of several steps none rounds but to fp32."""
    functions = _functions(steps)
    if len(functions) > 1:
        inputs = [each.float() for each in inputs]
    values: dict[str | float, Any] = {f"x{place}": each for place, each in enumerate(inputs)}
    for place, (function, given, numbers) in enumerate(functions):
        operands = [each if isinstance(each, float) else values[each] for each in given]
        values[f"v{place}"] = function(*operands, *numbers)
    result: Tensor = values[f"v{len(functions) - 1}"]
    return result


@cache
def _functions(steps: str) -> list[tuple[Callable[..., Tensor], list[str | float], tuple[float, ...]]]:
    """Of each step torch's function, what it takes, and an activation's two numbers."""
    found: list[tuple[Callable[..., Tensor], list[str | float], tuple[float, ...]]] = []
    for each in steps.split(";"):
        how, *texts = each.split(":")
        given: list[str | float] = [text if text[0] in "xv" else float(text) for text in texts]
        if how in PLAIN:
            found.append((PLAIN[how], given, ()))
        else:
            numbers = (*map(float, texts[1:]), 0.0, 0.0)
            found.append((ACTIVATIONS[how], given[:1], numbers[:2]))
    return found


def _label(kwargs: dict[str, Any]) -> str:
    steps = kwargs["steps"].split(";")
    return "+".join(each.split(":")[0] for each in steps) if len(steps) > 1 else ""


@step(_label, writes_any_dtype=True)
def pointwise(inputs: tuple[Tensor, ...], *, steps: str, out_dtype: torch.dtype) -> Tensor:
    enough = _FEW if ";" in steps else _FEW_OF_ONE
    if max([each.numel() for each in inputs]) >= enough and inputs[0].is_cpu:
        try:
            return _pointwise(inputs, steps, out_dtype)  # type: ignore[no-any-return]
        except RuntimeError:
            if are_broadcast(*[each.shape for each in inputs]):
                raise
    return computed(inputs, steps).to(out_dtype)  # with torch's error, where shapes do not go together


@chainable(pointwise, where=always, is_torchs=True)
def _pointwise_call(seen: Seen, inputs: tuple[Any, ...], *, steps: str, out_dtype: torch.dtype) -> Call | None:
    values = seen.values(inputs)
    if values is None:
        return None
    arguments = (tuple(values), steps, out_dtype)
    return Call("pointwise", arguments, values[0], broadcast, others=tuple(values[1:]), fits=are_broadcast)


def _is_plain_cast(node: Node) -> bool:
    known = len(shape_of(node)) <= _MOST_DIMS and dtype_of(node) in FLOATING and dtype_of(node.args[0]) in FLOATING
    return known and is_cast(node) and names_a_dtype(node)


def _cast_to(dtype: torch.dtype) -> Callable[..., Call]:
    def call(seen: Seen, input: Value) -> Call:
        return Call("pointwise", ((input,), "mul:x0:1.0", dtype), input, lambda shape: shape)

    return call


for _name, _dtype in (("float", torch.float32), ("bfloat16", torch.bfloat16), ("half", torch.float16)):
    chainable(_name, where=_is_plain_cast, is_torchs=True)(_cast_to(_dtype))


@chainable("to", where=_is_plain_cast, is_torchs=True)
def _to_call(seen: Seen, input: Value, *given: torch.dtype, **named: torch.dtype) -> Call:
    (dtype,) = (*given, *named.values())
    return _cast_to(dtype)(seen, input)


# ---- What is found ---------------------------------------------------------------------------------------------------


class FindPointwise(Pattern):
    stage: ClassVar[int] = 8  # behind all that takes such steps along, or computes them once
    switch: ClassVar[str] = "fuse_pointwise"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in reversed(list(graph.nodes)):
            steps = _steps_of(node) if node.users else None
            if steps is not None:
                members = _members_of(node, steps)
                if _is_worth_it(node, members):
                    _replace(graph, node, members)


def _is_floating(node: Any) -> bool:
    return isinstance(node, Node) and dtype_of(node) in FLOATING and len(shape_of(node)) <= _MOST_DIMS


def _steps_of(node: Any) -> list[_Step] | None:
    """What a node computes, step by step; of a cast nothing. None: something else."""
    if not _is_floating(node) or node.op not in ("call_function", "call_method"):
        return None
    steps = [] if is_cast(node) and names_a_dtype(node) else _found_steps(node)
    if steps is None or (not steps and not _is_floating(node.args[0])):
        return None
    values = [each for each_step in steps for each in each_step.of]
    known = all(each is _LAST or _is_floating(each) or type(each) in (int, float) for each in values)
    return steps if known and all(map(math.isfinite, (each for each in values if type(each) is float))) else None


def _found_steps(node: Node) -> list[_Step] | None:
    if node.target is combined and not node.kwargs.keys() - {"how"}:
        return [_Step(str(node.kwargs["how"]), node.args)]
    if node.target is relu_of_sum:
        return [_Step("add", node.args), _Step("relu", (_LAST,))]
    for how, targets in _BINARY.items():
        found = operands(node, targets)
        if found is not None:
            return [_Step(how, found)]
    if is_call(node, torch.addcmul) and len(node.args) == 3 and not node.kwargs:
        return [_Step("mul", node.args[1:]), _Step("add", (node.args[0], _LAST))]
    return _found_of_one(node)


def _found_of_one(node: Node) -> list[_Step] | None:
    if not node.args or not isinstance(node.args[0], Node):
        return None
    value = node.args[0]
    for how, targets in _UNARY.items():
        if is_call(node, *targets) and len(node.args) == 1 and not node.kwargs:
            return [_Step(how, (value,))]
    if is_call(node, operator.neg, torch.neg, "neg", "__neg__"):
        return [_Step("mul", (value, -1.0))]
    if is_call(node, torch.rsqrt, "rsqrt") and len(node.args) == 1:
        return [_Step("sqrt", (value,)), _Step("div", (1.0, _LAST))]
    if is_call(node, torch.square, "square") or (is_call(node, *_POWER) and argument(node, 1, "exponent") == 2):
        return [_Step("mul", (value, value))]
    found = plain_activation(node)
    if found is None:
        return None
    numbers = tuple(found[name] for name in ("alpha", "beta") if name in found)
    return [_Step(found["activation"], (value,), numbers)] if all(map(math.isfinite, numbers)) else None


_Members = dict[Node, list[_Step]]


def _members_of(last: Node, steps: list[_Step]) -> _Members:
    """The nodes that lead to a node and to nothing else, in the graph's order, and what each computes."""
    members = {last: steps}
    waiting = list(last.all_input_nodes)
    while waiting:
        node = waiting.pop()
        found = _steps_of(node)
        is_apart = shape_of(node) != shape_of(last) or not members.keys() >= set(node.users)
        if node in members or found is None or is_apart:
            continue
        members[node] = found
        if len(_inputs_of(last, members)) > MOST_INPUTS or sum(map(len, members.values())) > MOST_STEPS:
            del members[node]
            continue
        waiting += node.all_input_nodes
    return {node: members[node] for node in last.graph.nodes if node in members} if len(members) > 1 else members


def _inputs_of(last: Node, members: _Members) -> list[Node]:
    """Inputs as the last step meets them, since the first ones tell how its result lies in memory."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    waiting: list[Any] = [last]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in members:
            found[node] = None
            continue
        steps = members[node]
        given = [each for each_step in reversed(steps) for each in each_step.of] if steps else node.all_input_nodes
        waiting += [each for each in reversed(given) if isinstance(each, Node)]
    return list(found)


def _is_worth_it(last: Node, members: _Members) -> bool:
    """Not what is a link of a chain as it is, nor a few values that no chain will reach."""
    steps = [step for found in members.values() for step in found]
    if not steps or len(_inputs_of(last, members)) > MOST_INPUTS:
        return False
    if len(members) == 1 and _is_link(last, steps):
        return False
    few = _FEW_APART if len(steps) > 1 else _FEW_OF_ONE
    return math.prod(shape_of(last)) >= few or _is_beside_link(last, members)


def _is_beside_link(last: Node, members: _Members) -> bool:
    """Whether all that it is computed from, or all that comes of it, is a chain's, be it through views."""
    return all(map(_comes_of_link, _inputs_of(last, members))) or all(map(_leads_to_link, last.users))


def _comes_of_link(node: Any) -> bool:
    if node.op == "get_attr":
        return True
    return _comes_of_link(node.args[0]) if _is_chains_view(node) else _computes(node)


def _leads_to_link(node: Node) -> bool:
    return all(map(_leads_to_link, node.users)) if _is_chains_view(node) else _computes(node)


def _is_chains_view(node: Node) -> bool:
    kind = kind_of(node)
    return is_part(node) or (kind is not None and kind.is_view)


def _computes(node: Node) -> bool:
    kind = kind_of(node)
    if kind is None or kind.is_view:
        return False
    return not kind.is_torchs or (node.target is pointwise and math.prod(shape_of(node)) >= _FEW_APART)


def _is_link(node: Node, steps: list[_Step]) -> bool:
    if node.target in (combined, relu_of_sum):
        return True
    plain = len(steps) == 1 and steps[0].how in ("add", "sub", "mul")
    return plain and all(dtype_of(each) == dtype_of(node) for each in steps[0].of)


def _replace(graph: Graph, last: Node, members: _Members) -> None:
    inputs = _inputs_of(last, members)
    texts: dict[Any, str] = {each: f"x{place}" for place, each in enumerate(inputs)}
    lines: list[str] = []
    for node, steps in members.items():
        if not steps:  # a cast
            texts[node] = texts[node.all_input_nodes[0]]
        for each in steps:
            given = [texts[value] if value in texts else repr(float(value)) for value in each.of]
            lines.append(":".join([each.how, *given, *map(repr, each.numbers)]))
            texts[_LAST] = texts[node] = f"v{len(lines) - 1}"
    with graph.inserting_before(last):
        new = graph.call_function(pointwise, (tuple(inputs),), {"steps": ";".join(lines), "out_dtype": dtype_of(last)})
    put_in_place(graph, last, new)
    for node in reversed(members):
        if node is not last:
            graph.erase_node(node)
    write_rounded(new)
