"""Subclasses of nn.Linear that write out what it computes in a forward of their own (`x @ self.weight.T + self.bias`).

Such a forward is recorded, with tensors that have no memory. It is taken for nn.Linear's where the record is no more
than that product, and where it looks at nothing of the module that might be another thing later.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph
from torch.nn import functional

from xopt.graph.record import record
from xopt.graph.steps import expect
from xopt.modules.base import derive, own_forward, plain_parameter_problem
from xopt.modules.block import TensorBlock
from xopt.modules.pattern import ADD, argument, is_call, operands, transposed_matrix

_MATMUL = (torch.matmul, operator.matmul, "matmul", "__matmul__")
_KNOWN = frozenset({"weight", "bias"})
_SIMPLE = (type(None), bool, int, float, str, tuple)


def says_the_same(module: nn.Linear) -> bool:
    """Whether it has a forward of its own that is nn.Linear's in other words."""
    if not own_forward(module, nn.Linear) or "forward" in module.__dict__ or _looks_elsewhere(module):
        return False
    if plain_parameter_problem(module, "weight"):
        return False
    with_bias = module.bias is not None
    return all(is_product(result, with_bias) for result in results_of_rows(module))


def _looks_elsewhere(module: nn.Linear) -> bool:
    """Whether the forward reads more of the module than its weight and bias: flags, methods, other tensors."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or code.co_freevars:
        return True
    own = set(dir(type(module))) - set(dir(nn.Linear))
    held = {*module.__dict__, *module._parameters, *module._buffers, *module._modules}
    return bool(set(code.co_names) & ((own | held) - _KNOWN))


def read_of(module: nn.Module, code: CodeType) -> list[tuple[str, Any]] | None:
    """The attributes of a module that code may read, but for its weight and bias; None: it goes on to other code of the
    module's."""
    if code.co_freevars or any(isinstance(constant, CodeType) for constant in code.co_consts):
        return None
    own = set(dir(type(module))) - set(dir(nn.Module))
    names = [name for name in code.co_names if name not in _KNOWN]
    watched = [(name, getattr(module, name)) for name in names if name in own or name in module.__dict__]
    goes_on = any(isinstance(value, MethodType) and value.__self__ is module for _, value in watched)
    computed = any(hasattr(getattr(type(module), name, None), "__get__") for name, _ in watched)
    return None if goes_on or computed else watched


def is_still(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute is what it was."""
    now = getattr(module, name, None)
    return now is value or (type(value) in _SIMPLE and type(now) is type(value) and now == value)


def results_of_rows(module: Any) -> Iterator[Any]:
    """What the forward of a layer returns for rows of two, three and four dimensions, whatever their sizes are."""
    return (recorded_result(module, (*(1,) * dims, module.in_features), any_sizes=True) for dims in (2, 1, 3))


def recorded_result(module: Any, shape: tuple[int, ...], *, kind: Any = None, any_sizes: bool = False) -> Any:
    """What the record of a forward returns for a single tensor; None: it cannot be recorded. `kind`: the class whose
    forward it is; None: the module's. `any_sizes`: None as well where it branches on sizes."""
    try:
        graph = _recorded(module, kind or type(module), shape)
    except Exception:  # whatever a forward does when it meets a symbol: then it is another one
        return None
    if any_sizes and any(node.target is expect for node in graph.nodes):
        return None
    return next(node for node in graph.nodes if node.op == "output").args[0]


def _recorded(module: Any, kind: Any, shape: tuple[int, ...]) -> Graph:
    """Of a stand-in whose parameters and buffers have no values, so that nothing is computed."""
    derived: Any = derive(TensorBlock, kind)
    stand_in = derived.__new__(derived)
    with torch._C.DisableTorchFunction():  # the module may be part of a block that is being recorded
        parameters = {
            name: None if value is None else nn.Parameter(value.detach().to("meta"), requires_grad=False)
            for name, value in module._parameters.items()
        }
        held = module._buffers.items()
        buffers = {name: None if value is None else value.detach().to("meta") for name, value in held}
        input = torch.empty(shape, dtype=module._parameters["weight"].dtype, device="meta")
    stand_in.__dict__.update(module.__dict__, _parameters=parameters, _buffers=buffers)
    with torch.no_grad():
        return record(stand_in, kind.forward, (input,), {}).graph


def is_product(result: Any, with_bias: bool) -> bool:
    """Whether a recorded value is what nn.Linear computes of the input."""
    if is_call(result, functional.linear):
        input, weight, bias = (argument(result, place, name) for place, name in enumerate(("input", "weight", "bias")))
        return _is_input(input) and _is_named(weight, "weight") and _is_bias(bias, with_bias)
    product, bias = result, None
    found = operands(result, ADD)
    if found is not None:
        product, bias = found if is_call(found[0], *_MATMUL) else found[::-1]
    if not is_call(product, *_MATMUL) or len(product.args) != 2 or product.kwargs:
        return False
    input, weight = product.args
    return _is_input(input) and _is_named(transposed_matrix(weight), "weight") and _is_bias(bias, with_bias)


def _is_input(node: Any) -> bool:
    return getattr(node, "op", "") == "placeholder"


def _is_named(node: Any, name: str) -> bool:
    return getattr(node, "op", "") == "get_attr" and node.target == f":{name}"


def _is_bias(node: Any, wanted: bool) -> bool:
    return _is_named(node, "bias") if wanted else node is None
