"""Max and average pooling of images whose channels are last in memory, on `torch.ops.xopt.pool`.

Images in another layout, and those that want a gradient, are left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.symbol import Symbol, recorder_of
from xopt.modules.base import Context, Replacement, derive, own_forward
from xopt.modules.chain import Call, Seen, Value, chainable
from xopt.modules.pattern import dtype_of
from xopt.ops.fakes import FLOATING
from xopt.ops.pool import pooled_sizes

_DIMS: dict[type[nn.Module], int] = {
    **{nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3},
    **{nn.AvgPool1d: 1, nn.AvgPool2d: 2},
}
_pool = torch.ops.xopt.pool.default


def _kind_of(module: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in _DIMS if isinstance(module, kind)), None)


class _ImagePool(nn.Module):
    """What the replacements of both kinds do."""

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        kind = _kind_of(module)
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
            return recorder_of(symbol).call_module(self, pool, symbol)  # type: ignore[no-any-return]
        return pool(self, input)


class MaxPool(_ImagePool, Replacement, _MaxPoolNd):
    source: ClassVar[type[nn.Module]] = _MaxPoolNd
    switch: ClassVar[str] = "pool_images"


class AveragePool(_ImagePool, Replacement, _AvgPoolNd):
    source: ClassVar[type[nn.Module]] = _AvgPoolNd
    switch: ClassVar[str] = "pool_images"


def pool(module: Any, input: torch.Tensor) -> torch.Tensor:
    """What a replaced module computes."""
    kind = _kind_of(module)
    assert kind is not None, "a pool of an unknown kind was replaced"
    dims = _DIMS[kind]
    fits = input.dim() == dims + 2 and input.stride(1) == 1 and input.dtype in FLOATING
    if not fits or (torch.is_grad_enabled() and input.requires_grad):
        return kind.forward(module, input)  # type: ignore[no-any-return]
    kind_name, window = _window(module, dims, functools.partial(getattr, module))
    return _pool(input, kind_name, **window)  # type: ignore[no-any-return]


def _window(module: Any, dims: int, read: Callable[[str], Any]) -> tuple[str, dict[str, Any]]:
    """What the operator is told, in the order of its schema. `read`: of the module's attributes."""
    average = isinstance(module, _AvgPoolNd)

    def numbers(name: str) -> list[int]:
        value = read(name)
        return [value] * dims if isinstance(value, int) else list(value)

    window: dict[str, Any] = {name: numbers(name) for name in ("kernel_size", "stride", "padding")}
    window["dilation"] = [1] * dims if average else numbers("dilation")
    window["ceil_mode"] = read("ceil_mode")
    window["count_include_pad"] = average and read("count_include_pad")
    has_divisor = average and hasattr(module, "divisor_override")
    window["divisor"] = (read("divisor_override") or 0) if has_divisor else 0
    return "average" if average else "max", window


@chainable(pool, where=lambda node: dtype_of(node) in FLOATING)
def _pool_call(seen: Seen, module: Any, input: Value) -> Call:
    kind = _kind_of(module)
    assert kind is not None, "a pool of an unknown kind was replaced"
    dims = _DIMS[kind]
    name, window = _window(module, dims, functools.partial(seen.attribute, module))
    sizes = [window[each] for each in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")]

    def shape(image: Sequence[int]) -> tuple[int, ...]:
        return (*image[:2], *(int(size) for size in pooled_sizes(image[2:], *sizes)))

    return Call("pool", (input, name, *window.values()), input, shape, image_dims=dims + 2)
