"""A 3 x 3 convolution of an image that was upsampled to twice its size (nearest): as one step on the small image.

Of the nine places under the kernel many show the same pixel, so an output depends on 2 x 2 pixels, with sums of weights
as factors: four products instead of nine, and the large image is never made. These sums are a transposed convolution
with a kernel of 4 and a stride of 2. They are packed beside the weight when first needed, and again
after it has changed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph

from xopt.graph.record import EXAMPLE
from xopt.modules.base import result_dtype
from xopt.modules.computed_weight import weight_of
from xopt.modules.conv import PackedConv, conv, packed_weight
from xopt.modules.folded_norm import bounded, folded
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.pattern import Pattern, calls, is_call, only_user, replace, step
from xopt.modules.product import is_for_torch, label
from xopt.modules.upsample import interpolate

_SUMS = "_xopt_upsampled"
# Rows: the kernel of 4; columns: the weights that are added up for it.
_ADDENDS = ((0.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1.0, 1.0, 0.0), (1.0, 0.0, 0.0))
_conv_transpose = torch.ops.xopt.conv_transpose.default


class UpsampledConv(Pattern):
    stage: ClassVar[int] = 5  # after all that follows a convolution has gone into it
    switch: ClassVar[str] = "fuse_upsample"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        _rewrite(graph, (torch.float32,))


class UpsampledConvInHalves(Pattern):
    stage: ClassVar[int] = 5
    switch: ClassVar[str] = "fuse_upsample_rounded"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        _rewrite(graph, (torch.bfloat16, torch.float16))


def _rewrite(graph: Graph, dtypes: tuple[torch.dtype, ...]) -> None:
    for node in calls(graph, conv):
        module, image = node.args
        if not is_call(image, interpolate) or only_user(image) is not node or not _doubles(image.kwargs):
            continue
        if _fits(module.meta[EXAMPLE], dtypes):
            replace(graph, node, upsampled_conv, (module, image.args[0]), node.kwargs)


def _doubles(kwargs: dict[str, Any]) -> bool:
    factor = kwargs.get("scale_factor")
    factors = list(factor) if isinstance(factor, (list, tuple)) else [factor]
    is_nearest = kwargs.get("mode", "nearest") in ("nearest", "nearest-exact")
    return is_nearest and "size" not in kwargs and all(each == 2 for each in factors)


def _fits(module: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    ones = (1,) * len(module.kernel_size)
    alike = module.stride == module.padding == module.dilation == ones and module.kernel_size == (3,) * len(ones)
    plain = module.groups == 1 and module.padding_mode == "zeros"
    weight = packed_weight(module)
    return alike and plain and weight is not None and weight.dtype in dtypes


class _Sums:
    """Of a weight, as `torch.ops.xopt.conv_transpose` takes them."""

    def __init__(self, weight: PackedParameter) -> None:
        self._source = weight.place.packed
        self._version = self._source._version
        kernel = weight.unpack().float().transpose(0, 1)
        addends = torch.tensor(_ADDENDS)
        for dim in range(2, kernel.dim()):
            kernel = torch.tensordot(kernel, addends, ([dim], [1])).movedim(-1, dim)
        dims = kernel.dim() - 2
        self.shape = tuple(kernel.shape)
        taps = {"stride": [2] * dims, "dilation": [1] * dims}
        self.packed = torch.ops.xopt.conv_transpose_pack(kernel, 1, **taps, dtype=weight.dtype)

    def hold(self, weight: PackedParameter) -> bool:
        return weight.place.packed is self._source and self._source._version == self._version

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied module computes its own."""

    def __reduce__(self) -> Any:
        return type(None), ()


def _sums_of(module: PackedConv) -> _Sums:
    weight = weight_of(module)
    sums: _Sums | None = module.__dict__.get(_SUMS)
    if sums is None or not sums.hold(weight):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            sums = module.__dict__[_SUMS] = _Sums(weight)
    return sums


@step(lambda kwargs: "upsample+" + (label("conv")(kwargs) or "conv"))
def upsampled_conv(
    module: PackedConv,
    input: Tensor,
    *,
    norm: tuple[Tensor | None, ...] | None = None,
    eps: float = 0.0,
    affine: tuple[Tensor, ...] = (),
    other: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **after: Any,
) -> Tensor:
    bias: Tensor | None = module._parameters["bias"]
    dims = input.dim() - 2
    shape = (*input.shape[:1], module.out_channels, *(2 * size for size in input.shape[2:]))
    fits = (
        input.is_cpu
        and dims == len(module.kernel_size)
        and input.stride(1) == 1
        and (other is None or other.shape == shape)
    )
    # Nobody counts the changes of an inference tensor.
    weight = packed_weight(module)
    packed = weight is not None and not weight.place.packed.is_inference()
    if not fits or not packed or is_for_torch(input, bias):
        image = interpolate(input, scale_factor=2.0)
        after |= {"affine": affine, "other": other, "out_dtype": out_dtype}
        return conv(module, image, norm=norm, eps=eps, **after)
    sums = _sums_of(module)
    scale = None
    if norm is not None:
        scale, bias = folded(module, bias, norm, eps, affine)
        after = bounded(module, after) if affine else after
    ones = [1] * dims
    return _conv_transpose(  # type: ignore[no-any-return]
        input,
        sums.packed,
        sums.shape,
        bias,
        stride=[2] * dims,
        padding=ones,
        output_padding=[0] * dims,
        dilation=ones,
        scale=scale,
        other=other,
        out_dtype=result_dtype(input) if out_dtype is None else out_dtype,
        **after,
    )
