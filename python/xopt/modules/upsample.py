"""Nearest and linear interpolation of images whose channels are last in memory, on `torch.ops.xopt.upsample`.

`nn.Upsample` is replaced, and calls of `F.interpolate` are found in recorded forwards. Images in another layout, other
ways to interpolate (bicubic, area, with antialiasing), and those that want a gradient are left to torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.symbol import Symbol
from xopt.modules.base import Context, Replacement, derive, own_forward
from xopt.modules.chain import Call, Seen, Shape, Value, chainable
from xopt.modules.gradients import wants_gradient
from xopt.modules.pattern import Pattern, argument, calls, dtype_of, replace, shape_of, step
from xopt.modules.told_sizes import is_told_size, numbers_of
from xopt.ops.chain import Computed, Number, SizeOf
from xopt.ops.fakes import FLOATING

# By the names and numbers of dimensions that torch allows, what the operator calls them.
_MODES = {
    **{(mode, dims): mode for mode in ("nearest", "nearest-exact") for dims in (3, 4, 5)},
    **{("linear", 3): "linear", ("bilinear", 4): "linear", ("trilinear", 5): "linear"},
}
_KNOWN_MODES = frozenset(mode for mode, _ in _MODES)
_upsample = torch.ops.xopt.upsample.default

Factors = float | Sequence[float]


class Upsample(Replacement, nn.Upsample):
    source: ClassVar[type[nn.Module]] = nn.Upsample
    switch: ClassVar[str] = "upsample_images"

    @classmethod
    def why_not(cls, module: nn.Upsample, context: Context) -> str | None:
        if own_forward(module, nn.Upsample):
            return "it has a forward of its own"
        return None if module.mode in _KNOWN_MODES else f"its mode is {module.mode}"

    @classmethod
    def replace(cls, module: nn.Upsample, context: Context) -> str:
        module.__class__ = derive(cls, type(module))
        return "interpolates with the channels last"

    def forward(self, input: Any) -> Tensor:
        if type(input) is Symbol:
            symbol: Any = input
            return super().forward(symbol)  # recorded as the call of F.interpolate that it is
        return interpolate(
            input,
            self.size,
            self.scale_factor,
            mode=self.mode,
            align_corners=self.align_corners,
            recompute_scale_factor=self.recompute_scale_factor,
        )


class FindInterpolation(Pattern):
    stage: ClassVar[int] = 1
    switch: ClassVar[str] = "upsample_images"

    @classmethod
    def rewrite(cls, graph: Graph) -> None:
        for node in calls(graph, functional.interpolate):
            source: Any = node.args[0]
            known = argument(node, 3, "mode", "nearest") in _KNOWN_MODES and not argument(node, 6, "antialias", False)
            if known and dtype_of(node) in FLOATING and dtype_of(node) == dtype_of(source):
                arguments = {name: argument(node, place, name) for place, name in _ARGUMENTS}
                given = {name: value for name, value in arguments.items() if value is not None}
                for name in given.keys() & {"size", "scale_factor"}:  # as the operator takes them
                    each = given[name]
                    given[name] = each if isinstance(each, (tuple, list)) else (each,) * (len(shape_of(source)) - 2)
                replace(graph, node, interpolate, (source,), given)


_ARGUMENTS = ((1, "size"), (2, "scale_factor"), (3, "mode"), (4, "align_corners"), (5, "recompute_scale_factor"))


@step("upsample")
def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Factors | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> Tensor:
    """`F.interpolate`, which also says what is wrong with arguments that do not fit together."""
    known = _MODES.get((mode, input.dim()))
    target = None if known is None else _target(input, size, scale_factor, bool(recompute_scale_factor))
    fits = target is not None and input.stride(1) == 1 and input.dtype in FLOATING and not wants_gradient(input)
    if not fits or torch.compiler.is_compiling() or (known != "linear" and align_corners is not None):
        options: dict[str, Any] = {"align_corners": align_corners, "recompute_scale_factor": recompute_scale_factor}
        return functional.interpolate(input, size, scale_factor, mode, **options)
    assert target is not None
    return _upsample(input, target[0], known, align_corners=bool(align_corners), **target[1])  # type: ignore[no-any-return]


def _target(
    input: Tensor, size: Any, scale_factor: Factors | None, recomputed: bool
) -> tuple[list[int], dict[str, float]] | None:
    """The size of the result, and the scales that torch goes by: those given, unless they are to be computed anew.
    None, where torch has something to say about these arguments."""
    dims = input.dim() - 2
    if (size is None) == (scale_factor is None) or (size is not None and recomputed):
        return None
    if size is not None:
        sizes = list(size) if isinstance(size, (list, tuple)) else [size] * dims
        fits = len(sizes) == dims and all(type(each) is int and each > 0 for each in sizes)
        return (sizes, {}) if fits else None
    given: list[Any] = list(scale_factor) if isinstance(scale_factor, (list, tuple)) else [scale_factor] * dims
    factors = [float(each) for each in given if isinstance(each, (int, float)) and each > 0]
    if len(given) != dims or len(factors) != dims:
        return None
    sizes = [int(length * factor) for length, factor in zip(input.shape[2:], factors, strict=True)]
    if min(sizes) < 1 or min(input.shape[2:]) < 1:
        return None
    return sizes, {} if recomputed else dict(zip(_SCALES[-dims:], factors, strict=True))


_SCALES = ("scale_d", "scale_h", "scale_w")


def _scaled(size: Number, factor: float) -> Number | None:
    """What torch makes of a size by a factor that fp32 and fp64 have exactly."""
    if factor >= 1 and factor == int(factor):
        return Computed("*", size, int(factor))
    is_part = 0 < factor < 1 and math.frexp(factor)[0] == 0.5
    return Computed("//", size, int(1 / factor)) if is_part else None


def _is_plain(node: Node) -> bool:
    """Whether chains can tell the size of the result: sizes, whole factors, or a half, a quarter and so on."""
    given: Any = node.kwargs
    sizes, factors = (given.get(name, ()) for name in ("size", "scale_factor"))
    told = all(type(each) is int or is_told_size(each) for each in sizes)
    whole = all(type(each) in (int, float) and _scaled(0, each) is not None for each in factors)
    known = _MODES.get((given.get("mode", "nearest"), len(shape_of(node))))
    fits = known == "linear" or given.get("align_corners") is None
    one = bool(sizes) != bool(factors) and len(sizes or factors) == len(shape_of(node)) - 2
    return known is not None and one and told and whole and fits and not given.get("recompute_scale_factor")


@chainable(interpolate, where=_is_plain, takes_images=True)
def _interpolate_call(
    seen: Seen,
    input: Value,
    *,
    size: tuple[Any, ...] = (),
    scale_factor: tuple[float, ...] = (),
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> Call:
    scaled = [_scaled(SizeOf(input, 2 + dim), each) for dim, each in enumerate(scale_factor)]
    sizes = size or tuple([each for each in scaled if each is not None])
    dims = len(sizes)
    others, numbers = numbers_of(sizes)
    scales: list[float | None] = [None] * 3
    scales[3 - dims :] = map(float, scale_factor) if scale_factor else [None] * dims

    def shape(image: Shape, *shapes: Shape) -> Shape:
        return (*image[:2], *numbers(*shapes))

    arguments = (input, sizes, _MODES[mode, dims + 2], bool(align_corners), *scales)
    return Call("upsample", arguments, input, shape, image_dims=dims + 2, others=others)
