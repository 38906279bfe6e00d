"""What kind of work an operator does.

xopt's own operators say it themselves (`xopt.ops.costs`). Of torch's, those with a formula in flop_counter are
products, tags tell pointwise operators and reductions, schemas tell views; names decide the rest.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

import xopt

GEMM = "gemm"
CONV = "conv"
ATTENTION = "attention"
NORM = "norm"
POINTWISE = "pointwise"
REDUCTION = "reduction"
EMBEDDING = "embedding"
QUANTIZATION = "quantization"
REORDER = "reorder"
ALLOCATION = "allocation"
OVERHEAD = "framework overhead"
FALLBACK = "fallback"
OTHER = "other"

CATEGORIES = (
    GEMM,
    CONV,
    ATTENTION,
    NORM,
    POINTWISE,
    REDUCTION,
    EMBEDDING,
    QUANTIZATION,
    REORDER,
    ALLOCATION,
    FALLBACK,
    OTHER,
    OVERHEAD,
)
TAKEN_BY_XOPT = (GEMM, CONV, ATTENTION, NORM)
"""What xopt has kernels for."""
NESTED_APART = (REORDER, ALLOCATION)
"""Told apart also where they are part of a larger operator."""

# The first that matches decides; names are without their namespace.
_RULES = tuple(
    (re.compile(pattern), category)
    for pattern, category in (
        (r"^(_unsafe_view|_local_scalar_dense|detach_|(as_strided|squeeze|unsqueeze|transpose|t)_)$", OVERHEAD),
        (r"^(empty|new_empty|resize_$|set_$|_resize_)", ALLOCATION),
        (r"scaled_dot_product|attention", ATTENTION),
        (r"^(conv|_conv|mkldnn_conv|thnn_conv|_slow_conv|slow_conv|_nnpack|cudnn_conv)", CONV),
        (r"convolution", CONV),
        (r"linear_pointwise|_mkl_linear|mkldnn_linear|qlinear|rnn|lstm|_weight_int\wpack_mm|^(mm|bmm|mv|dot)$", GEMM),
        (r"^(native_)?(layer|group|batch|instance|local_response)_norm|_batch_norm|rms_norm|normalize", NORM),
        (r"^(embedding|_embedding|index_select|gather|index|take|masked_select)", EMBEDDING),
        (r"quantize|^q_|^choose_qparams|fake_quant|int_repr", QUANTIZATION),
        (
            r"reorder|to_mkldnn|to_dense|^(copy_|_to_copy|clone|cat|stack|_cat|repeat|roll|flip|pixel_(un)?shuffle)",
            REORDER,
        ),
        (r"^(constant_pad|pad|_pad|reflection_pad|replication_pad|im2col|col2im|channel_shuffle|contiguous)", REORDER),
        (r"softmax|pool|^(sum|mean|max|min|amax|amin|argmax|argmin|topk|sort|cumsum|norm|var|std|all|any)", REDUCTION),
        (
            r"^(upsample|_upsample|grid_sampl|fill_|zero_|arange|full|ones|zeros|bernoulli|uniform|normal|rand)",
            POINTWISE,
        ),
    )
)
_FUSED_NORM = re.compile(r"(layer|group|batch|rms)_norm|var_mean|rsqrt")
_FUSED_REDUCTION = re.compile(r"softmax|sum|mean|amax|argmax|pool")
PERSISTENT_REDUCTION = "persistent reduction"
"""Of a GPU: a reduction that keeps all it reduces in registers."""
_TRITON = (
    ("triton_per", PERSISTENT_REDUCTION),
    ("triton_red", REDUCTION),
    ("triton_split_scan", REDUCTION),
    ("triton_poi", POINTWISE),
    ("triton_for", POINTWISE),
)


@functools.cache
def category_of(name: str, overload: str) -> str:
    """The category of an operator; OVERHEAD where it only calls others or makes a view."""
    namespace, _, short = name.rpartition("::")
    if namespace == "xopt":
        cost = xopt.ops.costs.COSTS.get(short)
        return cost.category if cost is not None else REORDER
    if not namespace:
        return _category_of_region(name)
    operator = find_operator(name, overload)
    by_name = next((category for pattern, category in _RULES if pattern.search(short)), None)
    if by_name == ATTENTION:
        return ATTENTION
    if operator is not None and (_is_composite(operator) or _is_view(operator)):
        return OVERHEAD
    if by_name is not None:
        return by_name
    if operator is None:
        return OTHER
    if operator.overloadpacket in flop_registry:
        return GEMM
    if torch.Tag.reduction in operator.tags:
        return REDUCTION
    return POINTWISE if torch.Tag.pointwise in operator.tags else OTHER


def device_category(name: str, op: str) -> str:
    """Of a kernel of another device, by its own name and that of the operator that launched it."""
    for prefix, category in _TRITON:
        if name.startswith(prefix):
            return category
    lowered = name.lower()
    if re.search(r"memcpy|memset|nchwtonhwc|nhwctonchw", lowered):
        return REORDER
    if re.search(r"fmha|flash|attention", lowered):
        return ATTENTION
    if re.search(r"conv|dgrad|wgrad|fprop|implicit_gemm", lowered):
        return CONV
    if re.search(r"gemm|cutlass|cublas|nvjet|gemv|_mm_|splitk|^triton_(tem|mm)", lowered):
        return CONV if "convolution" in op else GEMM
    if op:
        found = category_of(op, "")
        if found not in (OVERHEAD, ALLOCATION):
            return found
    by_name = next((category for pattern, category in _RULES if pattern.search(lowered)), None)
    if by_name is not None:
        return by_name
    return REDUCTION if "reduce" in lowered else POINTWISE if "elementwise" in lowered else OTHER


@functools.cache
def find_operator(name: str, overload: str) -> Any:
    """torch's OpOverload, without an overload's name any of them, or None. Those that the dispatcher does not know are
    TorchScript's alone, such as aten::mul without a name."""
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), short, None)
    if packet is None:
        return None
    found = [getattr(packet, each, None) for each in ([overload] if overload else ["default", *packet.overloads()])]
    return next((each for each in found if each and torch._C._dispatch_has_kernel(each.name())), None)


def _is_composite(operator: Any) -> bool:
    qualified: str = operator.name()
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd")
        and not torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU")
    )


def _is_view(operator: Any) -> bool:
    """Whether it only gives its input another shape: some result is the input's memory, which is not written to."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.returns)


def _category_of_region(name: str) -> str:
    """Of a region without operators' names: a kernel of a compiled graph, or whatever somebody has marked."""
    if not is_compiled_kernel(name):
        return OVERHEAD
    if re.search(r"gemm|bmm", name, re.IGNORECASE):
        return GEMM
    if _FUSED_NORM.search(name):
        return NORM
    return REDUCTION if _FUSED_REDUCTION.search(name) else POINTWISE


def is_compiled_graph(name: str) -> bool:
    """Whether it is a region in which a graph of TorchInductor's runs."""
    return name.startswith("## Call CompiledFxGraph")


def is_compiled_kernel(name: str) -> bool:
    """Whether it is a loop that TorchInductor has written for the CPU."""
    return re.search(r"(^|_)cpp_[A-Za-z]", name) is not None
