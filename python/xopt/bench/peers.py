"""The contenders: our op, with and without a fused epilogue, and what torch offers for the same product.

A contender packs a weight, then binds a problem to a call that takes nothing but a packed weight, so that the timed
loop holds no Python work of ours. One that this build of torch or this CPU does not have raises UnavailableError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xopt.bench.errors import UnavailableError
from xopt.bench.problem import INPUT_SCALE, INPUT_ZERO_POINT, Problem, Weight

OURS = "xopt"
OURS_BIAS_GELU = "xopt + bias + gelu"
OURS_BIAS_RESIDUAL = "xopt + bias + residual"
OURS_BF16 = "xopt bf16"
EAGER = "F.linear"
ONEDNN = "oneDNN prepacked"
MKL = "MKL prepacked"

PEERS = (EAGER, ONEDNN, MKL)
FUSED = (OURS_BIAS_GELU, OURS_BIAS_RESIDUAL)

Packed = Any  # whatever the contender's call takes: a tensor
Call = Callable[[Packed], Tensor]


@dataclass(frozen=True)
class Contender:
    name: str
    dtypes: tuple[str, ...]
    pack: Callable[[Any, int], Packed]  # of a weight, for m rows; memory of its own at each call
    bind: Callable[[Any], Call]  # of a problem
    layout: str  # contenders of one layout share their packed weights
    packs_for_rows: bool = False  # the packed weight depends on m
    epilogue: str = "none"


def find_op(path: str) -> Any:
    """A torch op such as "mkldnn._linear_pointwise.default"."""
    try:
        return functools.reduce(getattr, path.split("."), torch.ops)
    except (AttributeError, RuntimeError) as error:
        raise UnavailableError(f"torch {torch.__version__} has no op {path}") from error


# ---- torch.nn.functional.linear -------------------------------------------------------------------------------------


def _eager_pack(weight: Weight, m: int) -> Packed:
    if weight.dtype == "int8":
        raise UnavailableError("torch.nn.functional.linear has no int8 form")
    return weight.values.clone()


def _eager_bind(problem: Problem) -> Call:
    return functools.partial(torch.nn.functional.linear, problem.input)


# ---- oneDNN ---------------------------------------------------------------------------------------------------------


def require_onednn(dtype: str) -> None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise UnavailableError("this build of torch has no oneDNN")
    if dtype == "bf16" and not find_op("mkldnn._is_mkldnn_bf16_supported.default")():
        raise UnavailableError("oneDNN has no bf16 on this CPU")


def _onednn_pack(weight: Weight, m: int) -> Packed:
    require_onednn(weight.dtype)
    if weight.dtype == "int8":
        return find_op("onednn.qlinear_prepack.default")(weight.values, [m, weight.values.shape[1]])
    return find_op("mkldnn._reorder_linear_weight.default")(weight.values, m)


def _onednn_bind(problem: Problem) -> Call:
    values = problem.input
    if problem.dtype != "int8":
        op = find_op("mkldnn._linear_pointwise.default")
        return lambda packed: op(values, packed, None, "none", [], "")
    quantized_op = find_op("onednn.qlinear_pointwise.default")
    scale, dtype = problem.weight.scale, problem.output_dtype
    zero_points = torch.zeros(len(scale), dtype=torch.int32)
    return lambda packed: quantized_op(
        values, INPUT_SCALE, INPUT_ZERO_POINT, packed, scale, zero_points, None, 1.0, 0, dtype, "none", [], ""
    )


# ---- MKL ------------------------------------------------------------------------------------------------------------


def _mkl_pack(weight: Weight, m: int) -> Packed:
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        raise UnavailableError("this build of torch has no MKL")
    return find_op("mkl._mkl_reorder_linear_weight.default")(weight.values, m)


def _mkl_bind(problem: Problem) -> Call:
    op = find_op("mkl._mkl_linear.default")
    values, original, m = problem.input, problem.weight.values, problem.shape.m
    return lambda packed: op(values, packed, original, None, m)


# ---- xopt -----------------------------------------------------------------------------------------------------------


def _our_pack(weight: Weight, m: int) -> Packed:
    if weight.dtype == "int8":
        return find_op("xopt.linear_pack_int8.default")(weight.values, weight.scale)
    return find_op("xopt.linear_pack.default")(weight.values, dtype=weight.values.dtype)


def _our_bind(problem: Problem, epilogue: str = "none") -> Call:
    arguments: dict[str, Any] = {}
    if epilogue != "none":
        arguments["bias"] = problem.weight.bias
    if epilogue == "bias_gelu":
        arguments["activation"] = "gelu_erf"
    elif epilogue == "bias_residual":
        arguments.update(binary="add", other=problem.residual)
    values, n = problem.input, problem.shape.n
    if problem.dtype != "int8":
        op = find_op("xopt.linear.default")
        return lambda packed: op(values, packed, n, **arguments)
    quantized_op = find_op("xopt.qlinear.default")
    scale, zero_point, dtype = problem.input_scale, problem.input_zero_point, problem.output_dtype
    return lambda packed: quantized_op(values, scale, zero_point, packed, n, out_dtype=dtype, **arguments)


def _ours(name: str, epilogue: str) -> Contender:
    bind = functools.partial(_our_bind, epilogue=epilogue)
    return Contender(name, ("f32", "bf16", "int8"), _our_pack, bind, layout="xopt", epilogue=epilogue)


ALL = (
    _ours(OURS, "none"),
    Contender(EAGER, ("f32", "bf16", "int8"), _eager_pack, _eager_bind, layout="plain"),
    Contender(ONEDNN, ("f32", "bf16", "int8"), _onednn_pack, _onednn_bind, layout="onednn", packs_for_rows=True),
    Contender(MKL, ("f32",), _mkl_pack, _mkl_bind, layout="mkl", packs_for_rows=True),
    _ours(OURS_BIAS_GELU, "bias_gelu"),
    _ours(OURS_BIAS_RESIDUAL, "bias_residual"),
)


def contenders(dtype: str, *, epilogues: bool = True) -> list[Contender]:
    return [one for one in ALL if dtype in one.dtypes and (epilogues or one.epilogue == "none")]
