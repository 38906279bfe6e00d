"""The layout of images in an optimized model: with the channels last, whatever the user passes.

Layers answer in the layout of their input, so it is enough to hand a model its images in the layout that its
convolutions compute in. Those of few channels stay as they are: a convolution puts their channels side by side as it
reads them, and answers with the channels last within the model. A forward that takes a view which only the source's
layout allows (`x.view(len(x), -1)` of an image) says so with an error; it then gets its input as it is, at once and
from then on. What the model returns has the layout that it would have had, and what it writes into an image that it was
given is written into the caller's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Graph

from xopt.graph.held import tensors_in
from xopt.modules.base import has_kernels
from xopt.modules.channels_last import as_torch, entered, inside, is_inside
from xopt.modules.containers import map_tensors
from xopt.modules.conv import PackedConv, weight_is_channels_last
from xopt.modules.conv_transpose import PackedConvTranspose
from xopt.modules.pattern import Pattern, allow_copies, calls, permutation, shape_of
from xopt.modules.substitute import are_plain, in_place_of
from xopt.ops.fakes import FLOATING

_log = logging.getLogger("xopt")

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_FEW_CHANNELS = 16  # what csrc/ops/conv_call.cpp takes from any layout
_VIEW_ERRORS = (
    "view size is not compatible",  # view
    "must be 1 to view",  # view(dtype)
    "must have a last dimension with stride 1",  # view_as_complex
)


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
    """Numbers of dimensions of what this model's convolutions are better given, and answer, with the channels last.
    None, where its weights have their channels last: then its layers see to it themselves, as torch's do."""
    convs = [part for part in module.modules() if isinstance(part, (PackedConv, PackedConvTranspose))]
    if any(weight_is_channels_last(conv) for conv in convs):
        return frozenset()
    return frozenset(len(conv.kernel_size) + 2 for conv in convs)


class Layout:
    """`dims`: see `image_dims`. A sequence (3) is not laid out anew: torch has no name for its layout, and the first
    convolution puts its channels side by side as it reads them."""

    def __init__(self, dims: frozenset[int]) -> None:
        self.given = dims
        self._dims = dims & _FORMATS.keys()
        self._plays_no_part = not dims
        self._takes_views = False
        self._was_right = False
        """Whether a forward in another layout has come to its end."""

    def call(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`forward(module, args, kwargs)` with images in another layout."""
        if self._plays_no_part or torch.compiler.is_compiling() or torch._C._is_tracing():
            return forward(module, args, kwargs)
        if self._takes_views:
            with as_torch():
                return forward(module, args, kwargs)
        values = (*args, *kwargs.values())
        images = [value for value in values if self._has_channels_first(value)]
        if not images and any(map(_is_channels_last, tensors_in(values))):
            with entered():
                return forward(module, args, kwargs)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        changed = args, kwargs
        if not all(map(_may_stay, images)):
            lay_out = functools.partial(self._channels_last, copies=copies)
            changed = tuple(map(lay_out, args)), {key: lay_out(value) for key, value in kwargs.items()}
        before = None if self._was_right else _Written(module, values)
        try:
            with inside():
                result = forward(module, *changed)
        except RuntimeError as error:
            if not any(words in str(error) for words in _VIEW_ERRORS):
                raise
            if before is not None:
                before.restore()
            self._takes_views = True
            _log.info("%s: computes in the layout of its input, since it takes views", type(module).__name__)
            return self.call(forward, module, args, kwargs)
        self._was_right = True
        for image, copy in copies:
            if copy._version > 0:
                image.copy_(copy)
        return map_tensors(contiguous, result)

    def is_ready_for(self, values: tuple[Any, ...]) -> bool | None:
        """Whether a forward of these computes with its images' channels last; None: it needs more than that."""
        if self._plays_no_part:
            return False
        if self._takes_views or not self._was_right:
            return None
        for value in values:  # written out: this is what calls of Python's are spared for
            if type(value) is not torch.Tensor or value.dim() not in _FORMATS:
                continue
            if value.layout != torch.strided or value.stride(1) == 1 or value.size(1) > _FEW_CHANNELS:
                return None
        return True

    def _has_channels_first(self, value: Any) -> bool:
        """Whether it is an image in another layout than convolutions compute in."""
        if type(value) is not torch.Tensor or value.dim() not in self._dims or value.dtype not in FLOATING:
            return False
        return value.stride(1) != 1 and has_kernels(value.device) and value.layout == torch.strided

    def _channels_last(self, value: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if not self._has_channels_first(value) or _may_stay(value):
            return value
        with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()):  # so that writes are counted
            copy = value.contiguous(memory_format=_FORMATS[value.dim()])
        copies.append((value, copy))
        return copy


@in_place_of(torch.Tensor.as_strided, torch.as_strided, switch=None)
def _as_strided(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Who counts places in memory counts them in the layout that torch would have given the tensor."""
    if not is_inside() or not are_plain(input) or input.is_contiguous() or not _is_dense(input):
        return NotImplemented
    return torch.as_strided(input.contiguous(), *args, **kwargs)


class _Written:
    """What a forward that may have to run twice could write: a model's buffers, and the tensors that it is given."""

    def __init__(self, module: nn.Module, values: tuple[Any, ...]) -> None:
        tensors = [*module.buffers(), *(value for value in values if type(value) is torch.Tensor)]
        self._copies = [(each, each._version, each.clone()) for each in tensors if not each.is_inference()]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, version, copy in self._copies:
                if tensor._version != version:
                    tensor.copy_(copy)


def contiguous(result: torch.Tensor) -> torch.Tensor:
    """Of what lies close together in another order, as convolutions answer."""
    if result.dim() < 3 or result.layout != torch.strided or result.is_contiguous():
        return result
    return result.contiguous() if result.stride(1) == 1 or _is_dense(result) else result


def _is_dense(value: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_channels_last(value: Any) -> bool:
    """Whether it is an image that the caller has laid out so, for which torch answers so."""
    if type(value) is not torch.Tensor or value.dim() not in _FORMATS:
        return False
    return value.stride(1) == 1 and not value.is_contiguous()


def _may_stay(image: torch.Tensor) -> bool:
    return image.size(1) <= _FEW_CHANNELS and image.is_cpu
