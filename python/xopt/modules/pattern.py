"""A pattern finds steps of a recorded graph that one of xopt's operators does at once, and puts it in their place.

Each pattern stands in the file of the module or operator that it is about, and is found through `__subclasses__`.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from xopt.graph.fresh import is_fresh
from xopt.graph.late import EFFECT
from xopt.graph.record import EXAMPLE
from xopt.graph.steps import Described, expect
from xopt.ops.fakes import FLOATING
from xopt.ops.views import contiguous_unless_channels_last


class Pattern:
    stage: ClassVar[int]
    """Patterns of a lower stage go first: 0 cleans up, 1 finds single operators, 2 merges siblings, 3 fuses chains."""
    switch: ClassVar[str | None]
    """The name in `Config` that turns it off, if anything does."""

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        """Changes the graph."""
        raise NotImplementedError


Step = TypeVar("Step", bound=Callable[..., Any])
_labels: dict[Any, Callable[[dict[str, Any]], str]] = {}
_writes_any_dtype: set[Any] = set()
_rounds_input: set[Any] = set()
_reads_parameters: set[Any] = set()


def step(
    label: str | Callable[[dict[str, Any]], str],
    *,
    writes_any_dtype: bool = False,
    rounds_input: bool = False,
    reads_parameters: bool = False,
) -> Callable[[Step], Step]:
    """Marks a function that patterns put into graphs, with its name in the report or how to tell it by the keyword
    arguments of a call; an empty one is no fusion. `writes_any_dtype`: its one result has the dtype that its argument
    `out_dtype` names, whatever it computes in. `rounds_input`: of its second argument it reads what is left in the
    dtype of the weight that its first one has, a module. `reads_parameters`: of its modules it reads nothing else that
    could change."""

    def mark(function: Step) -> Step:
        _labels[function] = (lambda kwargs: label) if isinstance(label, str) else label
        if writes_any_dtype:
            _writes_any_dtype.add(function)
        if rounds_input:
            _rounds_input.add(function)
        if reads_parameters:
            _reads_parameters.add(function)
        return function

    return mark


def fused_steps(graph: Graph) -> list[str]:
    labels = [_labels[node.target](node.kwargs) for node in graph.nodes if node.target in _labels]
    return [label for label in labels if label]


def writes_any_dtype(node: Any) -> bool:
    return isinstance(node, Node) and node.target in _writes_any_dtype


def reads_parameters(node: Node) -> bool:
    return node.target in _reads_parameters


def rounded_to(node: Any, reader: Node) -> torch.dtype | None:
    """The dtype in which alone a step reads another's result; None: it may read more of it."""
    arguments = [*reader.args, *reader.kwargs.values()]
    if reader.target not in _rounds_input or arguments[1] is not node or arguments.count(node) > 1:
        return None
    module: Any = reader.args[0]
    weight = module.meta[EXAMPLE]._parameters.get("weight")
    return None if weight is None else weight.dtype


def dtype_of(node: Any) -> torch.dtype | None:
    described = node.meta.get(EXAMPLE) if isinstance(node, Node) else None
    return described.dtype if isinstance(described, Described) else None


def take_rounded(graph: Graph, node: Node, source: Node, dtype: torch.dtype | None) -> None:
    """Has a step take what it casts anyway in that dtype, by a step of its own, which a chain may take along."""
    with graph.inserting_before(node):
        cast = described(graph.call_method("to", (source, dtype)))
    node.replace_input_with(source, cast)


def is_on_cpu(node: Any) -> bool:
    """Whether a recorded tensor was there, which the kind of a call tells of all."""
    known = node.meta.get(EXAMPLE)
    return isinstance(known, Described) and known.device == "cpu"


def shape_of(node: Any) -> tuple[int, ...]:
    """The sizes of the recorded call. Those that come from weights are the same in all calls; the others are not."""
    described = node.meta.get(EXAMPLE) if isinstance(node, Node) else None
    return described.shape if isinstance(described, Described) else ()


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these: functions, or names of tensor methods."""
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets


def calls(graph: Graph, *targets: Any) -> list[Any]:
    return [node for node in graph.nodes if is_call(node, *targets)]


def described(node: Node) -> Node:
    """A new step, with the description that a recorded one would have: what torch makes of tensors without memory. It
    has none where torch makes nothing of them (dtypes that only xopt brings together)."""

    def example(value: Any) -> Any:
        described = value.meta.get(EXAMPLE)
        if not isinstance(described, Described):
            return described
        return torch.empty(described.shape, dtype=described.dtype, device="meta")

    args, kwargs = map_arg((node.args, node.kwargs), example)
    function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    given = (source.meta.get(EXAMPLE) for source in node.all_input_nodes)
    device = next((each.device for each in given if isinstance(each, Described)), "cpu")
    with contextlib.suppress(RuntimeError), torch.no_grad():
        result = function(*args, **kwargs)
        node.meta[EXAMPLE] = Described(result.dtype, tuple(result.shape), device)
    return node


def only_user(node: Any) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def only_reader(node: Node) -> Any:
    """Who alone uses a tensor's values, whoever else wants to know its sizes."""
    found = readers(node)
    return found[0] if len(found) == 1 else None


def readers(node: Node) -> list[Node]:
    """Who uses a tensor's values, and not only its sizes."""
    return [user for user in node.users if not is_call(user, "size")]


def argument(node: Any, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def permutation(node: Any) -> tuple[int, ...] | None:
    """For each dimension of a tensor's view by `permute` or `transpose`, which of the tensor's it is."""
    dims = len(shape_of(node))
    if is_call(node, "permute", torch.permute):
        given = node.args[1:] if len(node.args) > 2 else argument(node, 1, "dims")
        known = isinstance(given, (tuple, list)) and all(isinstance(each, int) for each in given)
        return tuple(each % dims for each in given) if known else None
    if not is_call(node, "transpose", torch.transpose):
        return None
    pair = argument(node, 1, "dim0"), argument(node, 2, "dim1")
    if not all(isinstance(each, int) for each in pair):
        return None
    first, second = (each % dims for each in pair)
    swapped = {first: second, second: first}
    return tuple(swapped.get(dim, dim) for dim in range(dims))


def transposed_matrix(node: Any) -> Any:
    """The matrix, or stack of them, that a node has with rows and columns exchanged; None: it is no such view."""
    if is_call(node, "t", torch.t):
        return node.args[0]
    dims = len(shape_of(node))
    exchanged = (*range(dims - 2), dims - 1, dims - 2)
    return node.args[0] if is_call(node, "transpose", torch.transpose) and permutation(node) == exchanged else None


TO_DTYPES = ("float", "bfloat16", "half", "double", "type_as", "to", "type")


def is_cast(node: Any) -> bool:
    """Only a change of dtype, whatever way it is written."""
    if is_call(node, *TO_DTYPES):
        source = node.args[0]
        return dtype_of(node) is not None and isinstance(source, Node) and shape_of(source) == shape_of(node)
    return False


def without_casts(node: Any) -> Any:
    while is_cast(node):
        node = node.args[0]
    return node


ADD = (operator.add, torch.add, "add", "__add__", "__radd__")
SUBTRACT = (operator.sub, torch.sub, "sub", "__sub__")
MULTIPLY = (operator.mul, torch.mul, "mul", "__mul__", "__rmul__")
DIVIDE = (operator.truediv, torch.div, "div", "__truediv__")
MATMUL = (torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__")


VIEWS = ("reshape", "view", "transpose", "permute", "unflatten", "unsqueeze", "contiguous")
_ONLY_VIEWS = (
    *(*VIEWS, "flatten", contiguous_unless_channels_last),
    *(torch.reshape, torch.transpose, torch.permute, torch.flatten, torch.unsqueeze),
)


def is_view(node: Any) -> bool:
    return is_call(node, *_ONLY_VIEWS) and isinstance(node.args[0], Node)


def seen_in_views(node: Any) -> Any:
    """What a node is a view of, be it through several, if nobody else reads it: what is done to each value alone may
    as well be done to it, before."""
    while is_view(node) and only_reader(node.args[0]) is node:
        node = node.args[0]
    return node


def operands(node: Any, targets: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """The two operands of a plain addition or product."""
    if not is_call(node, *targets) or len(node.args) != 2 or node.kwargs:
        return None
    return node.args[0], node.args[1]


def orders(node: Any, targets: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """The two operands of a plain addition or product, either way round."""
    found = operands(node, targets)
    return [] if found is None else [found, found[::-1]]


def replace(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """A call in the place of a node. What only that node had used is left over, and removed by `remove_unused`."""
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    put_in_place(graph, node, new)
    return new


def put_in_place(graph: Graph, node: Node, new: Node) -> None:
    """A new step in the place of a node."""
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def allow_copies(node: Node) -> None:
    """For a result that lies in memory otherwise than the recorded one: `view`, which never copies, may fail where it
    did not before."""
    for user in node.users:
        if user.op == "call_method" and user.target == "view":
            user.target = "reshape"


def is_of_weights(node: Node) -> bool:
    """Whether it is computed from parameters alone, so that its sizes are the same in all calls."""
    return node.op == "get_attr" or (bool(node.all_input_nodes) and all(map(is_of_weights, node.all_input_nodes)))


def all_of_weights(graph: Graph) -> set[Node]:
    """All such steps."""
    found: set[Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "get_attr" or (sources and found.issuperset(sources)):
            found.add(node)
    return found


def is_stored(node: Any) -> bool:
    """Whether it is a parameter or a buffer of floats."""
    return isinstance(node, Node) and node.op == "get_attr" and dtype_of(node) in FLOATING


def is_stored_vector(node: Any) -> bool:
    """The same of one dimension."""
    return is_stored(node) and len(shape_of(node)) == 1


def come_before(node: Node, sources: Iterable[Any]) -> bool:
    """Whether all of these can be had where a node stands. What is computed from weights alone is moved there."""
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    late = [each for each in sources if isinstance(each, Node) and order[each] > order[node]]
    if not all(map(is_of_weights, late)):
        return False
    for each in late:
        _move_before(node, each, order)
    return True


def _move_before(node: Node, source: Node, order: dict[Node, int]) -> None:
    if order[source] > order[node]:
        for each in source.all_input_nodes:
            _move_before(node, each, order)
        node.prepend(source)


_ENLARGING = ("expand", "expand_as", "broadcast_to", torch.broadcast_to)


def leaves(node: Node) -> bool:
    """Whether the forward may return it, or hand it to somebody who keeps it."""
    views, waiting = {node}, [node]
    while waiting:
        view = waiting.pop()
        for user in view.users:
            if user.op == "output" or EFFECT in user.meta:
                return True
            if user not in views and _may_be_view(user, view):
                views.add(user)
                waiting.append(user)
    return False


def _may_be_view(user: Node, node: Node) -> bool:
    known, of = user.meta.get(EXAMPLE), node.meta.get(EXAMPLE)
    if is_fresh(user.target) or not isinstance(known, Described) or not isinstance(of, Described):
        return not is_fresh(user.target)
    larger = math.prod(known.shape) > math.prod(of.shape) and not is_call(user, *_ENLARGING)
    return known.dtype == of.dtype and not larger


def remove_unused(graph: Graph) -> None:
    """All recorded functions are pure, but for those that are marked."""
    for node in reversed(list(graph.nodes)):
        needed = EFFECT in node.meta or node.op in ("placeholder", "output") or node.target is expect
        if not node.users and not needed:
            graph.erase_node(node)


def used_only_for(source: Node, node: Node) -> bool:
    """Whether nobody else wants a step's result. The steps of an activation that is written out may use it
    several times, all on the way to `node`."""
    if only_user(source) is node:
        return True
    seen, waiting = set(), list(source.users)
    while waiting:
        user = waiting.pop()
        if user is node or user in seen:
            continue
        if user.op == "output" or user not in _before(node):
            return False
        seen.add(user)
        waiting += list(user.users)
    return True


def _before(node: Node) -> set[Node]:
    """The steps that a step is made of, a few levels deep."""
    found, level = set(), {node}
    for _ in range(8):
        level = {source for each in level for source in each.all_input_nodes}
        found |= level
    return found
