"""Max and average pooling of images whose channels are last in memory, on `torch.ops.xopt.pool`.

Modules are replaced, and calls of torch's functions are found in recorded forwards. Images in another layout, and those
that want a gradient, are left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.nn import functional
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.symbol import Symbol, recorder_of
from xopt.modules.base import Context, Replacement, derive, own_forward
from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.gradients import wants_gradient
from xopt.modules.pattern import Pattern, calls, dtype_of, replace, step
from xopt.ops.fakes import FLOATING
from xopt.ops.pool import pooled_sizes

_DIMS: dict[type[nn.Module], int] = {
    **{nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3},
    **{nn.AvgPool1d: 1, nn.AvgPool2d: 2},
}
_pool = torch.ops.xopt.pool.default


def kind_of(module: nn.Module, kinds: Iterable[type[nn.Module]]) -> type[nn.Module] | None:
    return next((kind for kind in kinds if isinstance(module, kind)), None)


def replaced_kind(module: nn.Module, dims_of: dict[type[nn.Module], int]) -> tuple[type[nn.Module], int]:
    """Torch's class of a module that was replaced, and its spatial dimensions."""
    kind = kind_of(module, dims_of)
    assert kind is not None, "a pool of an unknown kind was replaced"
    return kind, dims_of[kind]


class ImagePool(nn.Module):
    """What the replacements of layers that pool images have in common."""

    kinds: ClassVar[Iterable[type[nn.Module]]]
    """Torch's classes with a kernel."""
    compute: ClassVar[Callable[..., torch.Tensor]]
    """The step of a program: of the module and its input."""

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        kind = kind_of(module, cls.kinds)
        if kind is None:
            return "it has no kernel of its own"
        if own_forward(module, kind):
            return "it has a forward of its own"
        return "it returns indices" if getattr(module, "return_indices", False) else None

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        module.__class__ = derive(cls, type(module))
        return "pools with the channels last"

    def forward(self, input: Any) -> torch.Tensor:
        if type(input) is Symbol:
            symbol: Any = input
            return recorder_of(symbol).call_module(self, self.compute, symbol)  # type: ignore[no-any-return]
        return self.compute(self, input)


def for_kernel(input: torch.Tensor, dims: int) -> bool:
    """Whether the operators take it."""
    fits = input.dim() == dims + 2 and input.stride(1) == 1 and input.dtype in FLOATING
    return fits and not wants_gradient(input)


def pool(module: Any, input: torch.Tensor) -> torch.Tensor:
    """What a replaced module computes."""
    kind, dims = replaced_kind(module, _DIMS)
    result = _pooled(dims, input, *_window_of(module, dims, functools.partial(getattr, module)))
    return kind.forward(module, input) if result is None else result


def _window_of(module: Any, dims: int, read: Callable[[str], Any]) -> tuple[str, dict[str, Any]]:
    """The kind of pooling, and what else the operator is told. `read`: of the module's attributes."""
    window = (dims, read("kernel_size"), read("stride"), read("padding"), read("ceil_mode"))
    if isinstance(module, _MaxPoolNd):
        return "max", _window(*window, dilation=read("dilation"))
    divisor = read("divisor_override") if hasattr(module, "divisor_override") else None
    return "average", _window(*window, read("count_include_pad"), divisor)


def _window(
    dims: int,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = False,
    divisor_override: int | None = None,
    dilation: Any = 1,
) -> dict[str, Any]:
    """In the order of the operator's schema, by the names that torch's functions have."""

    def numbers(value: Any) -> list[int]:
        given = [value] if isinstance(value, int) else list(value)
        return given * dims if len(given) == 1 else given

    return {
        "kernel_size": numbers(kernel_size),
        "stride": numbers(stride or kernel_size),
        "padding": numbers(padding),
        "dilation": numbers(dilation),
        "ceil_mode": ceil_mode,
        "count_include_pad": count_include_pad,
        "divisor": divisor_override or 0,
    }


def _pooled(dims: int, input: torch.Tensor, kind: str, window: dict[str, Any]) -> torch.Tensor | None:
    """None: it is left to torch."""
    return _pool(input, kind, **window) if for_kernel(input, dims) else None


@chainable(pool, where=lambda node: dtype_of(node) in FLOATING, takes_images=True)
def _pool_call(seen: Seen, module: Any, input: Value) -> Call:
    _, dims = replaced_kind(module, _DIMS)
    return _call(dims, input, *_window_of(module, dims, functools.partial(seen.attribute, module)))


def _call(dims: int, input: Value, name: str, window: dict[str, Any]) -> Call:
    sizes = [window[each] for each in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")]

    def shape(image: Sequence[int]) -> tuple[int, ...]:
        return (*image[:2], *(int(size) for size in pooled_sizes(image[2:], *sizes)))

    return Call("pool", (input, name, *window.values()), input, shape, image_dims=dims + 2)


class MaxPool(ImagePool, Replacement, _MaxPoolNd):
    source: ClassVar[type[nn.Module]] = _MaxPoolNd
    switch: ClassVar[str] = "pool_images"
    kinds = _DIMS
    compute = staticmethod(pool)


class AveragePool(ImagePool, Replacement, _AvgPoolNd):
    source: ClassVar[type[nn.Module]] = _AvgPoolNd
    switch: ClassVar[str] = "pool_images"
    kinds = _DIMS
    compute = staticmethod(pool)


# ---- Functions in recorded forwards ---------------------------------------------------------------------------------


class FindPools(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "pool_images"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for by_dims, target, names in _FUNCTIONS:
            for dims, functions in enumerate(by_dims, 1):
                for node in calls(graph, *functions):
                    given = dict(zip(("input", *names), node.args, strict=False)) | node.kwargs
                    indices = given.pop("return_indices", False)
                    if given.keys() <= {"input", *names} and not indices and dtype_of(node) in FLOATING:
                        window = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
                        replace(graph, node, target, (dims, window.pop("input")), window)


def _has_constants(node: Node) -> bool:
    def is_constant(value: Any) -> bool:
        return all(map(is_constant, value)) if isinstance(value, tuple) else isinstance(value, (int, type(None)))

    return dtype_of(node) in FLOATING and all(map(is_constant, node.kwargs.values()))


@step("max_pool")
def max_pool(
    dims: int,
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> torch.Tensor:
    window = _window(dims, kernel_size, stride, padding, ceil_mode, dilation=dilation)
    result = _pooled(dims, input, "max", window)
    if result is not None:
        return result
    return _MAX[dims - 1](input, kernel_size, stride or kernel_size, padding, dilation, ceil_mode)  # type: ignore[no-any-return]


@step("avg_pool")
def average_pool(
    dims: int,
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    counts = (ceil_mode, count_include_pad, divisor_override)
    result = _pooled(dims, input, "average", _window(dims, kernel_size, stride, padding, *counts))
    if result is not None:
        return result
    rest = counts[:2] if dims == 1 else counts
    return _AVERAGE[dims - 1](input, kernel_size, stride or kernel_size, padding, *rest)  # type: ignore[no-any-return]


@chainable(max_pool, where=_has_constants, takes_images=True)
def _max_pool_call(seen: Seen, dims: int, input: Value, **window: Any) -> Call:
    return _call(dims, input, "max", _window(dims, **window))


@chainable(average_pool, where=_has_constants, takes_images=True)
def _average_pool_call(seen: Seen, dims: int, input: Value, count_include_pad: bool = True, **window: Any) -> Call:
    return _call(dims, input, "average", _window(dims, count_include_pad=count_include_pad, **window))


_MAX: tuple[Any, ...] = (torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)
_AVERAGE: tuple[Any, ...] = (functional.avg_pool1d, functional.avg_pool2d)
_MAX_FUNCTIONS = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_WINDOW = ("kernel_size", "stride", "padding")
_FUNCTIONS: tuple[tuple[Any, Any, tuple[str, ...]], ...] = (
    (tuple(zip(_MAX, _MAX_FUNCTIONS, strict=True)), max_pool, (*_WINDOW, "dilation", "ceil_mode")),
    (tuple(zip(_AVERAGE)), average_pool, (*_WINDOW, "ceil_mode", "count_include_pad", "divisor_override")),
)
