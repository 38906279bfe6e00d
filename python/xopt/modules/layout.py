"""The layout of images in an optimized model: with the channels last, whatever the user passes.

Layers answer in the layout of their input, so it is enough to hand a model its images in the layout that its
convolutions compute in. Those of few channels stay as they are: a convolution puts their channels side by side as it
reads them, and answers with the channels last within the model. A forward that takes a view which only the source's
layout allows (`x.view(len(x), -1)` of an image) says so with an error; it then gets its input as it is, at once and
from then on. What the model returns has the layout that it would have had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Graph

from xopt.modules.base import has_kernels
from xopt.modules.channels_last import inside
from xopt.modules.containers import map_tensors
from xopt.modules.conv import PackedConv, weight_is_channels_last
from xopt.modules.conv_transpose import PackedConvTranspose
from xopt.modules.pattern import Pattern, allow_copies, calls, permutation, shape_of
from xopt.ops.fakes import FLOATING

_log = logging.getLogger("xopt")

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_FEW_CHANNELS = 16  # what csrc/ops/conv_call.cpp takes from any layout
_VIEW_ERROR = "view size is not compatible"


class KeepChannelsLast(Pattern):
    """Tokens that become an image again (`x.reshape(n, h, w, c).permute(0, 3, 1, 2).contiguous()`) lie as convolutions
    want them, before they are made contiguous."""

    stage: ClassVar[int] = 0
    switch: ClassVar[str] = "conv_prepack"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, "contiguous"):
            image: Any = node.args[0]
            if len(node.args) == 1 and not node.kwargs and _has_channels_last(image):
                node.replace_all_uses_with(image)
                graph.erase_node(node)
                allow_copies(image)


def _has_channels_last(image: Any) -> bool:
    dims = len(shape_of(image))
    return dims in _FORMATS and permutation(image) == (0, dims - 1, *range(1, dims - 1))


def image_dims(module: nn.Module) -> frozenset[int]:
    """Numbers of dimensions of the images that this model's convolutions are better given with the channels last.
    None, where its weights have their channels last: then its layers see to it themselves, as torch's do."""
    convs = [part for part in module.modules() if isinstance(part, (PackedConv, PackedConvTranspose))]
    if any(weight_is_channels_last(conv) for conv in convs):
        return frozenset()
    return frozenset(len(conv.kernel_size) + 2 for conv in convs) & _FORMATS.keys()


class Layout:
    def __init__(self, dims: frozenset[int]) -> None:
        self._dims = dims

    def call(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`forward(module, args, kwargs)` with images in another layout."""
        if not self._dims or torch.compiler.is_compiling() or torch._C._is_tracing():
            return forward(module, args, kwargs)
        images = [value for value in (*args, *kwargs.values()) if self._has_channels_first(value)]
        if not images:
            return forward(module, args, kwargs)
        changed = args, kwargs
        if not all(map(_may_stay, images)):
            changed = tuple(map(self._channels_last, args)), {k: self._channels_last(v) for k, v in kwargs.items()}
        try:
            with inside():
                result = forward(module, *changed)
        except RuntimeError as error:
            if _VIEW_ERROR not in str(error):
                raise
            self._dims = frozenset()
            _log.info(
                "%s: computes in the layout of its input, since it takes a view of an image", type(module).__name__
            )
            return forward(module, args, kwargs)
        return map_tensors(self._contiguous, result)

    def _has_channels_first(self, value: Any) -> bool:
        """Whether it is an image in another layout than convolutions compute in."""
        if type(value) is not torch.Tensor or value.dim() not in self._dims or value.dtype not in FLOATING:
            return False
        return value.stride(1) != 1 and has_kernels(value.device) and value.layout == torch.strided

    def _channels_last(self, value: Any) -> Any:
        if not self._has_channels_first(value) or _may_stay(value):
            return value
        return value.contiguous(memory_format=_FORMATS[value.dim()])

    def _contiguous(self, result: torch.Tensor) -> torch.Tensor:
        is_image = result.dim() in self._dims and result.layout == torch.strided
        return result.contiguous() if is_image else result


def _may_stay(image: torch.Tensor) -> bool:
    return image.size(1) <= _FEW_CHANNELS and image.is_cpu
