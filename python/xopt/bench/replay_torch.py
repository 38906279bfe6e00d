"""Who replays what is no product: torch's own function for the same work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from xopt.bench.errors import UnavailableError
from xopt.bench.replay_contender import Contender
from xopt.bench.replay_operands import Named

Tensor = torch.Tensor


def torch_contenders(kernel: dict[str, Any], make: Callable[[], Named], all_instances: bool) -> list[Contender]:
    run = _FUNCTIONS.get(kernel["operator"].removeprefix("xopt::"))
    return [] if run is None or not kernel["operator"].startswith("xopt::") else [Contender("torch", make, run)]


def _matmul(named: Named) -> Tensor:
    product = torch.matmul(named["left"], named["right"]) * named.get("alpha", 1.0)
    other = named.get("other")
    result: Tensor = product if other is None else product + other
    return result.to(named.get("out_dtype") or product.dtype)


def _softmax(named: Named) -> Tensor:
    return torch.softmax(named["input"], -1, dtype=named.get("out_dtype"))


def _after_residual(named: Named) -> Tensor:
    values: Tensor = named["input"]
    return values if named.get("residual") is None else values + named["residual"]


def _layer_norm(named: Named) -> Tensor:
    values = _after_residual(named)
    weight, bias = (_like(named.get(name), values) for name in ("weight", "bias"))
    return F.layer_norm(values, values.shape[-1:], weight, bias, named.get("eps", 1e-5))


def _rms_norm(named: Named) -> Tensor:
    values, weight = _after_residual(named), named.get("weight")
    if weight is not None:
        weight = _like(weight + named.get("weight_offset", 0.0), values)
    return F.rms_norm(values, values.shape[-1:], weight, named.get("eps", 1e-6))


def _unit_norm(named: Named) -> Tensor:
    return F.normalize(named["input"], dim=-1, eps=named.get("eps", 1e-12))


def _group_norm(named: Named) -> Tensor:
    values = named["input"]
    weight, bias = (_like(named.get(name), values) for name in ("weight", "bias"))
    normed = F.group_norm(values, int(named["groups"]), weight, bias, named.get("eps", 1e-5))
    return _activation(named)(normed)


def _activation(named: Named) -> Callable[[Tensor], Tensor]:
    activation = named.get("activation", "none")
    if activation not in _ACTIVATIONS:
        raise UnavailableError(f"the bench has no {activation} of torch's")
    return _ACTIVATIONS[activation]


def _batch_norm(named: Named) -> Tensor:
    values = named["input"]
    mean, variance, weight, bias = (_like(named.get(name), values) for name in ("mean", "variance", "weight", "bias"))
    normed = F.batch_norm(values, mean, variance, weight, bias, eps=named.get("eps", 1e-5))
    activation, other = _activation(named), named.get("other")
    if other is None:
        return activation(normed)
    together: Any = getattr(torch, named["binary"])
    last = named.get("activation_last", False)
    return activation(together(normed, other)) if last else together(activation(normed), other)


def _like(values: Tensor | None, other: Tensor) -> Tensor | None:
    return None if values is None else values.to(other.dtype)


def _pool(named: Named) -> Tensor:
    values, sizes = named["input"], (named["kernel_size"], named["stride"], named["padding"])
    dims = values.dim() - 2
    if named["kind"] == "max":
        largest: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
        return largest(values, *sizes, named["dilation"], named.get("ceil_mode", False))  # type: ignore[no-any-return]
    counts = named.get("ceil_mode", False), named.get("count_include_pad", True)
    if dims == 1:
        return F.avg_pool1d(values, *sizes, *counts)
    mean: Any = (F.avg_pool2d, F.avg_pool3d)[dims - 2]
    return mean(values, *sizes, *counts, named.get("divisor") or None)  # type: ignore[no-any-return]


def _adaptive_pool(named: Named) -> Tensor:
    dims = named["input"].dim() - 2
    largest = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
    mean = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
    function: Any = (largest if named["kind"] == "max" else mean)[dims - 1]
    return function(named["input"], named["output_size"])  # type: ignore[no-any-return]


def _upsample(named: Named) -> Tensor:
    values, mode = named["input"], named["mode"].replace("_", "-")
    if mode != "linear":
        return F.interpolate(values, named["size"], mode=mode)
    mode = ("linear", "bilinear", "trilinear")[values.dim() - 3]
    return F.interpolate(values, named["size"], mode=mode, align_corners=named.get("align_corners", False))


def _concat(named: Named) -> Tensor:
    return torch.cat(named["tensors"], named["dim"])


def _combine(named: Named) -> Tensor:
    combined: Tensor = getattr(torch, named["how"])(named["first"], named["second"])
    return combined.relu() if named.get("relu") else combined


def _pointwise(named: Named) -> Tensor:
    """One function of torch's after the other."""
    known: dict[str, Any] = {f"x{place}": each for place, each in enumerate(named["inputs"])}
    for place, step in enumerate(named["steps"].split(";")):
        how, *given = step.split(":")
        values = [known[each] if each in known else float(each) for each in given]
        function: Any = getattr(torch, how, None) or getattr(F, how, None) or _ACTIVATIONS.get(how)
        if function is None:
            raise UnavailableError(f"{how} is not one of torch's functions")
        result: Tensor = function(*values)
        known[f"v{place}"] = result
    return result.to(named.get("out_dtype") or named["inputs"][0].dtype)


def _window_partition(named: Named) -> Tensor:
    image, (height, width) = named["image"], named["window"]
    bottom, right = -image.shape[1] % height, -image.shape[2] % width
    padded = F.pad(image, (0, 0, 0, right, 0, bottom)) if bottom or right else image
    rolled: Tensor = padded.roll(tuple(named["shift"]), (1, 2)) if any(named["shift"]) else padded
    images, down, across, channels = rolled.shape
    cut = rolled.reshape(images, down // height, height, across // width, width, channels)
    return cut.transpose(2, 3).contiguous()


def _window_merge(named: Named) -> Tensor:
    merged = named["windows"].transpose(2, 3).flatten(3, 4).flatten(1, 2)
    rolled: Tensor = merged.roll(tuple(named["shift"]), (1, 2)) if any(named["shift"]) else merged
    return rolled[:, : named["size"][0], : named["size"][1]].contiguous()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "silu": F.silu,
    "relu": F.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda values: F.gelu(values, approximate="tanh"),
    "quick_gelu": lambda values: values * torch.sigmoid(1.702 * values),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}
_FUNCTIONS: dict[str, Callable[[Named], Tensor]] = {
    "matmul": _matmul,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "unit_norm": _unit_norm,
    "group_norm": _group_norm,
    "pool": _pool,
    "adaptive_pool": _adaptive_pool,
    "upsample": _upsample,
    "concat": _concat,
    "combine": _combine,
    "pointwise": _pointwise,
    "batch_norm": _batch_norm,
    "window_partition": _window_partition,
    "window_merge": _window_merge,
}
