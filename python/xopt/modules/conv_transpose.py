"""nn.ConvTranspose1d, ConvTranspose2d and ConvTranspose3d with packed weights, on `torch.ops.xopt.conv_transpose`.

As with convolutions (`conv.py`), the operator computes with the channels last in memory, and a layer answers in the
layout of its input. How a weight is packed depends on the geometry (`Taps`), so that is kept beside it.
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
from xopt.modules.base import Context, Replacement, derive, own_forward, result_dtype
from xopt.modules.computed_weight import before_class, weight_of
from xopt.modules.conv import keeps_channels_last, pack_convolution
from xopt.modules.folded_norm import folded
from xopt.modules.packed_layout import Taps
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import step
from xopt.modules.product import finished, is_for_torch, label, plain_parameters, product_problem, told
from xopt.modules.wide_taps import find_wide
from xopt.ops.conv_transpose import output_sizes

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
    on_cpu_only: ClassVar[bool] = True
    switch: ClassVar[str] = "conv_prepack"

    @classmethod
    def why_not(cls, module: _ConvTransposeNd, context: Context) -> str | None:
        kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
        if kind is None or own_forward(module, kind):
            return "it has a forward of its own"
        return product_problem(module)

    @classmethod
    def replace(cls, module: _ConvTransposeNd, context: Context) -> str:
        packed_class = derive(cls, type(module), before=before_class(module))
        return pack_convolution(module, context, _taps(module), packed_class)

    def forward(self, input: Any, output_size: Any = None) -> torch.Tensor:
        dims = len(self.kernel_size)
        geometry = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
        extra = tuple(self._output_padding(input, output_size, *geometry))  # type: ignore[arg-type]
        if type(input) is Symbol:
            symbol: Any = input
            dtype = result_dtype(symbol)
            return recorder_of(symbol).call_module(self, conv_transpose, symbol, extra, out_dtype=dtype)  # type: ignore[no-any-return]
        bias = self._parameters["bias"]
        if not has_packed_taps(self, extra) or is_for_torch(input, bias):
            return self.plain_forward(input, extra)
        return run(self, input, extra, bias, **told({}, input, None))

    def plain_forward(self, input: torch.Tensor, output_padding: Sequence[int]) -> torch.Tensor:
        weight, bias = plain_parameters(self, input)
        function = _FUNCTIONS[len(self.kernel_size)]
        options = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return function(input, weight, bias, *options)  # type: ignore[no-any-return]


def _taps(module: Any) -> Taps:
    last = (module.kernel_size, module.stride, module.padding, module.output_padding, module.dilation)
    wide = find_wide(module.out_channels, *(each[-1] for each in last)) if module.groups == 1 else None
    return Taps(tuple(module.stride), tuple(module.dilation), wide)


def has_packed_taps(module: Any, output_padding: Sequence[int]) -> bool:
    """Whether the weight is packed, for what the module's attributes say now, and for as many outputs."""
    weight = weight_of(module)
    taps = weight.place.taps if type(weight) is PackedParameter else None
    if taps is None or taps.stride != module.stride or taps.dilation != module.dilation:
        return False
    wide = taps.wide
    return wide is None or (wide.padding == module.padding[-1] and wide.output_padding >= output_padding[-1])


def run(
    module: Any,
    input: torch.Tensor,
    output_padding: Sequence[int],
    bias: torch.Tensor | None,
    *,
    scale: torch.Tensor | None = None,
    other: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The operator with a module's packed weight and geometry."""
    weight: PackedParameter = weight_of(module)
    if input.dim() == weight.dim() - 1:  # a single image
        other = None if other is None else other.unsqueeze(0)
        options |= {"scale": scale, "other": other}
        return run(module, input.unsqueeze(0), output_padding, bias, **options).squeeze(0)
    keeps = keeps_channels_last(module, input)
    taps: Any = weight.place.taps
    wide, padding, missing = taps.wide, module.padding, 0
    if wide is not None:
        missing = wide.output_padding - output_padding[-1]
        padding, output_padding = (*padding[:-1], wide.wide_padding), (*output_padding[:-1], 0)
        bias, scale = (None if each is None else each.repeat(wide.stride) for each in (bias, scale))
        other = None if other is None else _in_blocks(other, wide.stride, missing)
    result: torch.Tensor = _conv_transpose(
        input,
        weight.place.packed,
        taps.packed_shape(weight.shape),
        bias,
        **taps.packed_geometry(),
        padding=padding,
        output_padding=output_padding,
        groups=module.groups,
        scale=scale,
        other=other,
        **options,
    )
    if wide is not None:
        result = _out_of_blocks(result, wide.stride, missing)
    return result if keeps else result.contiguous()


def _in_blocks(image: torch.Tensor, size: int, missing: int) -> torch.Tensor:
    """Neighbours along the width as one pixel of `size` times the channels; `missing` ones of the last are zeros."""
    if missing:
        image = functional.pad(image, (0, missing))
    pixels = image.movedim(1, -1)
    return pixels.reshape(*pixels.shape[:-2], -1, size * pixels.shape[-1]).movedim(-1, 1)


def _out_of_blocks(image: torch.Tensor, size: int, missing: int) -> torch.Tensor:
    blocks = image.movedim(1, -1)  # which is how they lie
    pixels = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * size, blocks.shape[-1] // size)
    if missing:
        pixels = pixels[..., :-missing, :].contiguous()
    return pixels.movedim(-1, 1)


def output_shape(module: Any, input: torch.Tensor, output_padding: Sequence[int]) -> tuple[int, ...]:
    dims = len(module.kernel_size)
    geometry = (module.kernel_size, module.stride, module.padding, output_padding, module.dilation)
    return (*input.shape[: -dims - 1], module.out_channels, *output_sizes(input.shape[-dims:], *geometry))


@step(label("conv_transpose"), writes_any_dtype=True, rounds_input=True)
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
    if not has_packed_taps(module, output_padding) or not fits or is_for_torch(input, bias):
        result = module.plain_forward(input, output_padding)
        return finished(result, norm=norm, eps=eps, other=other, out_dtype=out_dtype, **after)
    scale, bias = folded(module, bias, norm, eps)
    return run(module, input, output_padding, bias, **told(after, input, out_dtype, scale=scale, other=other))
