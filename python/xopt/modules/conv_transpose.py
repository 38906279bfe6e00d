"""nn.ConvTranspose1d, ConvTranspose2d and ConvTranspose3d with packed weights, on `torch.ops.xopt.conv_transpose`.

As with convolutions (`conv.py`), the operator computes with the channels last in memory, and a layer answers in the
layout of its input. How a weight is packed depends on the stride and the dilation, so they are kept beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvTransposeNd

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.symbol import Symbol, recorder_of
from xopt.modules.base import Context, Replacement, own_forward, result_dtype
from xopt.modules.conv import keeps_channels_last, pack_convolution
from xopt.modules.folded_norm import folded
from xopt.modules.packed_parameter import PackedParameter, Taps
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import step
from xopt.modules.product import finished, is_for_torch, label, plain_parameters, product_problem

_KINDS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FUNCTIONS: dict[int, Any] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}
_conv_transpose = torch.ops.xopt.conv_transpose.default


class PackedConvTranspose(Replacement, PackedState, _ConvTransposeNd):
    """Computes with its packed weight on CPU tensors that want no gradient, as PackedConv does."""

    source: ClassVar[type[nn.Module]] = _ConvTransposeNd
    switch: ClassVar[str] = "conv_prepack"

    @classmethod
    def why_not(cls, module: _ConvTransposeNd, context: Context) -> str | None:
        kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
        if kind is None or own_forward(module, kind):
            return "it has a forward of its own"
        return product_problem(module)

    @classmethod
    def replace(cls, module: _ConvTransposeNd, context: Context) -> str:
        return pack_convolution(cls, module, context, _taps(module))

    def forward(self, input: Any, output_size: Any = None) -> torch.Tensor:
        dims = len(self.kernel_size)
        geometry = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
        extra = tuple(self._output_padding(input, output_size, *geometry))  # type: ignore[arg-type]
        if type(input) is Symbol:
            symbol: Any = input
            dtype = result_dtype(symbol)
            return recorder_of(symbol).call_module(self, conv_transpose, symbol, extra, out_dtype=dtype)  # type: ignore[no-any-return]
        bias = self._parameters["bias"]
        if not has_packed_taps(self) or is_for_torch(input, bias):
            return self.plain_forward(input, extra)
        return run(self, input, extra, bias, out_dtype=result_dtype(input))

    def plain_forward(self, input: torch.Tensor, output_padding: Sequence[int]) -> torch.Tensor:
        weight, bias = plain_parameters(self, input)
        function = _FUNCTIONS[len(self.kernel_size)]
        options = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return function(input, weight, bias, *options)  # type: ignore[no-any-return]


def _taps(module: Any) -> Taps:
    return tuple(module.stride), tuple(module.dilation)


def has_packed_taps(module: Any) -> bool:
    """Whether the weight is packed, and for what the module's attributes say now."""
    weight = module._parameters["weight"]
    return type(weight) is PackedParameter and weight.place.taps == _taps(module)


def run(
    module: Any, input: torch.Tensor, output_padding: Sequence[int], bias: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """The operator with a module's packed weight and geometry."""
    weight: PackedParameter = module._parameters["weight"]
    if input.dim() == weight.dim() - 1:  # a single image
        other = options.pop("other", None)
        if other is not None:
            options["other"] = other.unsqueeze(0)
        return run(module, input.unsqueeze(0), output_padding, bias, **options).squeeze(0)
    keeps = keeps_channels_last(module, input)
    result: torch.Tensor = _conv_transpose(
        input,
        weight.place.packed,
        weight.shape,
        bias,
        stride=module.stride,
        padding=module.padding,
        output_padding=output_padding,
        dilation=module.dilation,
        groups=module.groups,
        **options,
    )
    return result if keeps else result.contiguous()


def output_shape(module: Any, input: torch.Tensor, output_padding: Sequence[int]) -> tuple[int, ...]:
    dims = len(module.kernel_size)
    spatial = []
    for i, size in enumerate(input.shape[-dims:]):
        span = module.dilation[i] * (module.kernel_size[i] - 1)
        spatial.append((size - 1) * module.stride[i] - 2 * module.padding[i] + span + output_padding[i] + 1)
    return (*input.shape[: -dims - 1], module.out_channels, *spatial)


@step(label("conv_transpose"))
def conv_transpose(
    module: PackedConvTranspose,
    input: torch.Tensor,
    output_padding: Sequence[int],
    *,
    norm: tuple[torch.Tensor | None, ...] | None = None,
    eps: float = 0.0,
    other: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **after: Any,
) -> torch.Tensor:
    """The step of a recorded graph that calls the module; patterns hand it what follows: see `finished`."""
    bias: torch.Tensor | None = module._parameters["bias"]
    fits = other is None or other.shape == output_shape(module, input, output_padding)
    if not has_packed_taps(module) or not fits or is_for_torch(input, bias):
        result = module.plain_forward(input, output_padding)
        return finished(result, norm=norm, eps=eps, other=other, out_dtype=out_dtype, **after)
    scale = None
    if norm is not None:
        scale, bias = folded(module, bias, norm, eps)
    return run(
        module,
        input,
        output_padding,
        bias,
        scale=scale,
        other=other,
        out_dtype=result_dtype(input) if out_dtype is None else out_dtype,
        **after,
    )
