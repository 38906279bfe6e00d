"""nn.Conv1d, Conv2d and Conv3d with packed weights, on `torch.ops.xopt.conv`.

The operator computes with the channels last in memory. As with torch, a layer answers in the layout of its input, or
with the channels last where its weight had them so, or where `layout.py` has said so for all of a model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.record import EXAMPLE
from xopt.graph.symbol import Symbol, recorder_of
from xopt.modules import channels_last
from xopt.modules.base import Context, Replacement, derive, dtype_name, forward_problem, own_forward, result_dtype
from xopt.modules.chain import Call, Seen, Shape, Stored, Value, chainable
from xopt.modules.computed_weight import before_class, is_computed, pack_computed, take_weight, weight_of
from xopt.modules.folded_norm import bounded, fold_seen, folded, of_images
from xopt.modules.packed_layout import Taps
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import step
from xopt.modules.product import finished, fused_arguments, is_for_torch, label, plain_parameters, product_problem, told
from xopt.modules.told_sizes import is_told_size, numbers_of
from xopt.ops.chain import Computed, Number
from xopt.ops.conv import output_sizes
from xopt.ops.fakes import FLOATING

_CHANNELS_LAST = "_xopt_channels_last"  # in a module's __dict__: its source's weight had its channels last

_conv = torch.ops.xopt.conv.default


class PackedConv(Replacement, PackedState, _ConvNd):
    """Computes with its packed weight on CPU tensors that want no gradient, as PackedProduct does."""

    source: ClassVar[type[nn.Module]] = _ConvNd
    switch: ClassVar[str] = "conv_prepack"

    @classmethod
    def why_not(cls, module: _ConvNd, context: Context) -> str | None:
        kind = kind_of(module)
        if kind is None:
            return f"there is no kernel for a {type(module).__name__}"
        if type(module)._conv_forward is not kind._conv_forward:
            return "it has a forward of its own"
        return forward_problem(module, kind) or product_problem(module)

    @classmethod
    def replace(cls, module: _ConvNd, context: Context) -> str:
        return pack_convolution(module, context, None, _derived(module))

    def forward(self, input: Any) -> torch.Tensor:
        return self.product(input)

    def product(self, input: Any) -> torch.Tensor:
        """The convolution alone, whatever a class of modules has around it."""
        if type(input) is Symbol:
            symbol: Any = input
            return recorder_of(symbol).call_module(self, conv, symbol, out_dtype=result_dtype(symbol))  # type: ignore[no-any-return]
        bias = self._parameters["bias"]
        weight = packed_weight(self)
        if weight is None or is_for_torch(input, bias):
            return self.plain_forward(input)
        return run(self, weight, input, bias, **told({}, input, None))

    def plain_forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = plain_parameters(self, input)
        return self._conv_forward(input, weight, bias)


def pack_convolution(module: _ConvNd, context: Context, taps: Taps | None, packed_class: type) -> str:
    """Changes a convolution in place, or one with these taps, a transposed one; what was done."""
    weight = module.weight
    module.__dict__[_CHANNELS_LAST] = False
    if is_computed(module):
        detail = pack_computed(module, context.dtype, groups=module.groups, taps=taps)
        module.__class__ = packed_class
        return detail
    packed = context.replaced.get(id(weight))
    if packed is None:
        packed = PackedParameter.pack(weight, context.target(weight), groups=module.groups, taps=taps)
        context.replaced[id(weight)] = packed
    elif type(packed) is not PackedParameter or (packed.place.groups, packed.place.taps) != (module.groups, taps):
        module._parameters["weight"] = nn.Parameter(weight.detach().clone(), weight.requires_grad)  # not the source's
        return "left to torch: its weight is shared with a layer of another kind"
    module.__dict__[_CHANNELS_LAST] = weight.stride(1) == 1 and not weight.is_contiguous()
    module._parameters["weight"] = packed
    module.__class__ = packed_class
    return f"packed as {dtype_name(packed.dtype)}"


class _PackedConv1d(PackedConv, nn.Conv1d):
    """Below a class with a forward of its own, this stands before the class that it goes on to."""


class _PackedConv2d(PackedConv, nn.Conv2d):
    pass


class _PackedConv3d(PackedConv, nn.Conv3d):
    pass


_BELOW: dict[Any, type[PackedConv]] = {nn.Conv1d: _PackedConv1d, nn.Conv2d: _PackedConv2d, nn.Conv3d: _PackedConv3d}


def kind_of(module: nn.Module) -> Any:
    return next((kind for kind in _BELOW if isinstance(module, kind)), None)


def _derived(module: nn.Module) -> type:
    kind = kind_of(module)
    if own_forward(module, kind):
        return derive(_BELOW[kind], type(module), below=True, before=before_class(module))
    return derive(PackedConv, type(module), before=before_class(module))


def packed_weight(module: nn.Module) -> PackedParameter | None:
    """The weight that the operator takes; None: it is not packed, or not for that operator."""
    weight = weight_of(module)
    is_packed = type(weight) is PackedParameter and weight.place.groups is not None and weight.place.taps is None
    return weight if is_packed else None


def weight_is_channels_last(module: nn.Module) -> bool:
    """Whether a layer's weight had its channels last, and it so answers with the channels last whatever it is given."""
    return bool(module.__dict__.get(_CHANNELS_LAST))


def keeps_channels_last(module: nn.Module, input: torch.Tensor) -> bool:
    """Whether its answer to this input has the channels last. Torch's has for images that have, but for no sequence."""
    if weight_is_channels_last(module) or channels_last.is_inside():
        return True
    return input.stride(1) == 1 and not (input.dim() == 3 and channels_last.answers_as_torch())


def run(
    module: Any,
    weight: PackedParameter,
    input: torch.Tensor,
    bias: torch.Tensor | None,
    pad: Sequence[int] = (),
    **options: Any,
) -> torch.Tensor:
    """The operator with a module's packed weight and geometry. `pad`: zeros around the input, as `conv` has them."""
    if input.dim() == weight.dim() - 1:  # a single image
        other = options.pop("other", None)
        if other is not None:
            options["other"] = other.unsqueeze(0)
        return run(module, weight, input.unsqueeze(0), bias, pad, **options).squeeze(0)
    keeps = keeps_channels_last(module, input)
    padding = _padding(module, pad)
    if module.padding_mode != "zeros":
        # Modules keep these amounts in the order that pad takes; the operator then pads no more. Autocast would widen.
        with torch.autocast(input.device.type, enabled=False):
            input = functional.pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = (0,) * len(padding)
    groups = module.groups
    if groups != 1:
        options["groups"] = groups
    result: torch.Tensor = _conv(
        input,
        weight.place.packed,
        weight.shape,
        bias,
        stride=module.stride,
        padding=padding,
        dilation=module.dilation,
        **options,
    )
    return result if keeps else result.contiguous()


def _padding(module: Any, pad: Sequence[int] = ()) -> tuple[int, ...]:
    return amounts_of(module.padding, module.kernel_size, module.dilation, pad)


def amounts_of(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int], pad: Sequence[int] = ()
) -> tuple[int, ...]:
    """Zeros before and after, for each spatial dimension. `pad` has those of the last dimension first."""
    return _amounts(padding if isinstance(padding, str) else tuple(padding), tuple(kernel), tuple(dilation), tuple(pad))


@functools.lru_cache(maxsize=1024)  # asked before each product
def _amounts(
    padding: str | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...], pad: tuple[int, ...]
) -> tuple[int, ...]:
    amounts: list[int] = []
    for place, (size, step_) in enumerate(zip(kernel, dilation, strict=True)):
        if padding == "same":
            total = step_ * (size - 1)
            amounts += [total // 2, total - total // 2]
        else:
            amount = 0 if isinstance(padding, str) else padding[place]
            amounts += [amount, amount]
    for place, amount in enumerate(pad):
        amounts[_place_of_pad(place, len(amounts))] += amount
    return tuple(amounts)


def _place_of_pad(place: int, count: int) -> int:
    return count - 2 * (place // 2 + 1) + place % 2


def output_shape_of(module: Any, input_shape: Sequence[int], pad: Sequence[int] = ()) -> tuple[int, ...]:
    geometry = (tuple(module.kernel_size), tuple(module.stride), _padding(module, pad), tuple(module.dilation))
    return _output_shape(tuple(input_shape), module.out_channels, geometry)


@functools.lru_cache(maxsize=1024)
def _output_shape(shape: tuple[int, ...], channels: int, geometry: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    dims = len(geometry[0])
    sizes: list[Any] = output_sizes(shape[-dims:], *geometry)
    return (*shape[: -dims - 1], channels, *sizes)


@step(label("conv"), writes_any_dtype=True, rounds_input=True)
def conv(
    module: PackedConv,
    input: torch.Tensor,
    *,
    norm: tuple[torch.Tensor | None, ...] | None = None,
    eps: float = 0.0,
    other: torch.Tensor | None = None,
    pad: Sequence[int] = (),
    affine: tuple[torch.Tensor, ...] = (),
    out_dtype: torch.dtype | None = None,
    **after: Any,
) -> torch.Tensor:
    """The step of a recorded graph that calls the module; patterns hand it what follows: see `finished`. `pad`: zeros
    that its input gets before, as `torch.nn.functional.pad` takes them."""
    bias: torch.Tensor | None = module._parameters["bias"]
    if pad and (module.padding_mode != "zeros" or min(pad) < 0):
        input, pad = functional.pad(input, pad), ()
    weight = packed_weight(module)
    if weight is None or (other is not None and other.shape != output_shape_of(module, input.shape, pad)):
        input = functional.pad(input, pad) if pad else input
        norm = of_images(norm, len(module.kernel_size))
        result = module.product(input)
        return finished(result, norm=norm, eps=eps, affine=affine, other=other, out_dtype=out_dtype, **after)
    scale, bias = folded(module, bias, norm, eps, affine)
    after = bounded(module, after) if affine else after
    return run(module, weight, input, bias, pad, **told(after, input, out_dtype, scale=scale, other=other))


def _is_plain(node: Node) -> bool:
    """Whether its geometry is the module's own in all calls, or follows from sizes."""
    module: Any = node.args[0]
    example = module.meta[EXAMPLE]
    pad: Any = node.kwargs.get("pad", ())
    is_told = all(is_told_size(amount) or (type(amount) is int and amount >= 0) for amount in pad)
    return example.padding_mode == "zeros" and is_told and node.kwargs.get("out_dtype") in FLOATING


@chainable(conv, where=_is_plain, takes_images=True)
def _conv_call(
    seen: Seen,
    module: Any,
    input: Value,
    *,
    out_dtype: torch.dtype,
    norm: tuple[Stored | None, ...] | None = None,
    eps: float = 0.0,
    other: Value | None = None,
    pad: tuple[Number, ...] = (),
    affine: tuple[Stored, ...] = (),
    **after: Any,
) -> Call | None:
    weight = packed_weight(module)
    if weight is None or seen.attribute(module, "padding_mode") != "zeros":
        return None
    stride, padding, dilation, groups = (
        seen.attribute(module, name) for name in ("stride", "padding", "dilation", "groups")
    )
    own = amounts_of(padding, module.kernel_size, dilation)
    amounts = _with_pad(own, pad)
    others, numbers = numbers_of(amounts)
    channels, kernel = module.out_channels, tuple(module.kernel_size)
    packed = take_weight(seen, module, weight)
    scale, bias = fold_seen(seen, module, norm, eps, affine)
    after = bounded(module, after) if affine else after
    arguments = (input, packed, weight.shape, bias, stride, amounts, dilation, groups, scale)

    def shape(image: Shape, *shapes: Shape) -> Shape:
        return _output_shape(image, channels, (kernel, tuple(stride), tuple(numbers(*shapes)), tuple(dilation)))

    def fits(image: Shape, *shapes: Shape) -> bool:
        return all(padded >= by_itself for padded, by_itself in zip(numbers(*shapes), own, strict=True))

    return Call(
        "conv",
        (*arguments, *fused_arguments(after, other), out_dtype),
        input,
        shape,
        image_dims=weight.dim(),
        any_layout=weight_is_channels_last(module) or None,
        alike=other,
        others=others,
        fits=fits if others else None,
    )


def _with_pad(amounts: tuple[int, ...], pad: tuple[Number, ...]) -> tuple[Number, ...]:
    """What a convolution pads itself and what is padded before it, which has the last dimension first."""
    together: list[Number] = list(amounts)
    for place, amount in enumerate(pad):
        at = _place_of_pad(place, len(amounts))
        together[at] = amounts[at] + amount if isinstance(amount, int) else Computed("+", amounts[at], amount)
    return tuple(together)
