"""nn.Linear with a packed weight, on `torch.ops.xopt.linear`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.autocast import is_own
from xopt.graph.record import EXAMPLE, in_floats
from xopt.graph.symbol import Symbol, active, recorder_of
from xopt.modules.base import (
    Context,
    Replacement,
    cast_parameter,
    derive,
    dtype_name,
    forward_problem,
    own_forward,
    result_dtype,
)
from xopt.modules.chain import Call, Seen, Stored, Value, always, chainable
from xopt.modules.computed_weight import before_class, is_computed, pack_computed, take_weight, weight_of
from xopt.modules.folded_norm import fold_seen, folded
from xopt.modules.packed_layout import Columns, Place
from xopt.modules.packed_parameter import PackedParameter, place_of
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import step
from xopt.modules.plain_forward import says_the_same
from xopt.modules.product import finished, fused_arguments, is_for_torch, label, plain_parameters, product_problem, told
from xopt.modules.substitute import are_plain, in_place_of, was_widened
from xopt.ops.chain import Part
from xopt.ops.fakes import FLOATING

_linear = torch.ops.xopt.linear.default


class PackedProduct(PackedState):
    """Computes with its packed weight wherever it can: on CPU tensors that want no gradient. A weight that somebody
    put in the packed one's place (functional_call, an assignment) is used as torch would use it."""

    out_features: int
    weight: Any
    bias: Any
    transposed: ClassVar[bool] = False
    """Whether the logical weight is [in, out]."""

    @classmethod
    def pack(cls, module: Any, context: Context, below: bool = False) -> str:
        """Changes a module of the source class in place; what was done, in words for the report. `below`: see
        `derive`."""
        if is_computed(module):
            detail = pack_computed(module, context.dtype, transposed=cls.transposed)
            module.__class__ = derive(cls, type(module), below=below, before=before_class(module))
            return detail
        weight = module.weight
        module.__class__ = derive(cls, type(module), below=below)
        if id(weight) in context.shared:
            module._parameters["weight"] = cast_parameter(weight, context)
            return "cast, not packed: its weight is shared with a module that reads it in the plain layout"
        module._parameters["weight"] = packed = context.pack(weight, cls.transposed)
        return f"packed as {dtype_name(packed.dtype)}"

    def forward(self, input: Any) -> Any:
        return self.product(input)

    def product(self, input: Any) -> torch.Tensor:
        """What nn.Linear computes, whatever else a class of modules has around it."""
        if active.recorder is not None and isinstance(input, torch.Tensor):
            input = active.recorder.symbol_of(input)  # a model's own parameter, of which this may be computed once
        if type(input) is Symbol:
            symbol: Any = input
            return recorder_of(symbol).call_module(self, linear, symbol, out_dtype=result_dtype(symbol))  # type: ignore[no-any-return]
        place, bias = place_of(weight_of(self)), self._parameters["bias"]
        if place is None or is_for_torch(input, bias):
            return self.plain_forward(input)
        return _product(self, place, input, bias, told({}, input, None))

    def plain_forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = plain_parameters(self, input)
        return functional.linear(input, weight.t() if self.transposed else weight, bias)


class PackedLinear(Replacement, PackedProduct, nn.Linear):
    source: ClassVar[type[nn.Module]] = nn.Linear
    switch: ClassVar[str] = "weights_prepack"
    packs: ClassVar[bool] = True
    reads_packed: ClassVar[bool] = True

    @classmethod
    def why_not(cls, module: nn.Linear, context: Context) -> str | None:
        problem = forward_problem(module, nn.Linear)
        if problem is not None and says_the_same(module):
            problem = None
        return problem or product_problem(module)

    @classmethod
    def replace(cls, module: nn.Linear, context: Context) -> str:
        if not own_forward(module, nn.Linear):
            return cls.pack(module, context)
        below = forward_problem(module, nn.Linear) is None and not says_the_same(module)
        return (cls if below else PackedWrittenOut).pack(module, context, below)


class PackedWrittenOut(PackedLinear):
    """Of a class with a forward of its own that says what nn.Linear's does, when it is given a tensor alone. It may
    take more than that, by any name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            return self.product(args[0])
        return super(PackedState, self).forward(*args, **kwargs)  # the source's own


@in_place_of(functional.linear, switch="weights_prepack")
def _linear_of_torch(input: Any, weight: Any, bias: Any = None) -> Any:
    """Of a forward that takes a layer's weight and calls torch's function itself."""
    if not are_plain(input, bias):
        return NotImplemented
    asks_for_floats = is_own() and was_widened(input)
    return _linear_in_floats(input, weight, bias) if asks_for_floats else times_weight(input, weight, bias)


def _linear_in_floats(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Of a forward that asks for it (routers of mixtures do): a model of bf16 has it so, and autocast would not."""
    product = times_weight(input, weight, bias, out_dtype=torch.float32)
    if product is not NotImplemented:
        return product  # type: ignore[no-any-return]
    if any(tensor is not None and tensor.dtype != torch.float32 for tensor in (weight, bias)):
        return functional.linear(input, weight, bias)
    with torch.autocast(input.device.type, enabled=False):
        return functional.linear(input, weight, bias)


in_floats[functional.linear] = _linear_in_floats


def weight_times(weight: Any, columns: torch.Tensor) -> Any:
    """weight @ columns, as a linear layer's result for each of the columns. NotImplemented: for torch."""
    product = times_weight(columns.mT, weight, None) if columns.ndim >= 2 else NotImplemented
    return product if product is NotImplemented else product.mT.contiguous()  # a forward may go on by `view`


def times_weight(
    input: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    *,
    turned: bool = False,
    index: int | None = None,
    other: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **after: Any,
) -> Any:
    """functional.linear where the weight is packed, whosever it is, with what follows: see `finished`. `turned`: the
    weight is [in, out]. `index`: which of a stack it is. NotImplemented: for torch."""
    place = place_of(weight)
    columns = None if place is None else weight.columns(index)
    if place is None or columns is None or weight.transposed != turned or is_for_torch(input, bias):
        return NotImplemented
    features = columns.features
    if other is not None and not is_output_like(other, input, features):
        return NotImplemented
    if input.shape[-1:] != (weight.in_features,) or (bias is not None and bias.shape != (features,)):
        return NotImplemented
    if other is None or columns.computed == features:
        return product_of_columns(input, place, columns, bias, told(after, input, out_dtype, other=other))
    product = product_of_columns(input, place, columns, bias, told({}, input, out_dtype))
    return finished(product, other=other, out_dtype=out_dtype, **after)


def product_of_columns(
    input: torch.Tensor, place: Place, columns: Columns, bias: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """By some of a packed weight's columns; whole panels are computed, and what pads the last is left out."""
    first, features, computed = columns
    if computed == features:
        return _linear(input, place.packed, features, bias, first_column=first, **options)  # type: ignore[no-any-return]
    bias = None if bias is None else functional.pad(bias, (0, computed - features))
    return _linear(input, place.packed, computed, bias, first_column=first, **options)[..., :features]  # type: ignore[no-any-return]


def _product(
    module: PackedProduct, place: Place, input: torch.Tensor, bias: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    if place.first_column != 0:
        options["first_column"] = place.first_column
    return _linear(input, place.packed, module.out_features, bias, **options)  # type: ignore[no-any-return]


def is_output_like(other: torch.Tensor, input: torch.Tensor, features: int) -> bool:
    """Whether a tensor has the shape of a product, which it had when the graph was recorded."""
    return other.shape[:-1] == input.shape[:-1] and other.shape[-1] == features


@step(label("linear"), writes_any_dtype=True, rounds_input=True, reads_parameters=True)
def linear(
    module: PackedProduct,
    input: torch.Tensor,
    *,
    norm: tuple[torch.Tensor | None, ...] | None = None,
    eps: float = 0.0,
    other: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **after: Any,
) -> torch.Tensor:
    """The step of a recorded graph that calls the module; patterns hand it what follows: see `finished`."""
    place = place_of(weight_of(module))
    bias: torch.Tensor | None = module._parameters["bias"]
    if place is None or (other is not None and not is_output_like(other, input, module.out_features)):
        result = module.product(input)
        if norm is not None and norm[0] is not None:  # torch's BatchNorm has channels in the second dimension
            result, norm = finished(result.movedim(-1, 1), norm=norm, eps=eps).movedim(1, -1), None
        return finished(result, norm=norm, eps=eps, other=other, out_dtype=out_dtype, **after)
    scale, bias = folded(module, bias, norm, eps)
    return _product(module, place, input, bias, told(after, input, out_dtype, scale=scale, other=other))


def linear_call(
    input: Value,
    packed: Value | Part | None,
    width: int,
    bias: Value | Part | None,
    out_dtype: torch.dtype,
    first_column: int = 0,
    *,
    scale: Value | Part | None = None,
    other: Value | None = None,
    **after: Any,
) -> Call:
    """A chain's call of the operator, with what follows the product: see `finished`."""
    fused = fused_arguments(after, other)
    arguments = (input, packed, width, bias, *fused, out_dtype, 1.0, 0, first_column, scale)
    return Call("linear", arguments, input, lambda rows: (*rows[:-1], width), alike=other)


def has_own_packed_weight(module: Node) -> bool:
    """Whether the weight of a recorded module is a packed parameter of it."""
    example: Any = module.meta[EXAMPLE]
    return not is_computed(example) and type(weight_of(example)) is PackedParameter


def _is_plain(node: Node) -> bool:
    module: Any = node.args[0]
    return node.kwargs.get("out_dtype") in FLOATING and type(weight_of(module.meta[EXAMPLE])) is PackedParameter


@chainable(linear, where=_is_plain, is_row_major=always)
def _linear_call(
    seen: Seen,
    module: PackedProduct,
    input: Value,
    *,
    out_dtype: torch.dtype,
    norm: tuple[Stored | None, ...] | None = None,
    eps: float = 0.0,
    other: Value | None = None,
    **after: Any,
) -> Call | None:
    weight = weight_of(module)
    place = place_of(weight)
    if place is None:
        return None
    out_features = seen.attribute(module, "out_features")
    packed = take_weight(seen, module, weight)
    scale, bias = fold_seen(seen, module, norm, eps)
    first = place.first_column
    return linear_call(input, packed, out_features, bias, out_dtype, first, scale=scale, other=other, **after)
