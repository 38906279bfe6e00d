"""The contenders of a convolution: our op, torch's, and oneDNN's with its weight prepacked.

Where the model adds a residual and takes a ReLU, also with all of it: fused, and as the steps apart.
"""

from __future__ import annotations

from typing import Any

import torch

from xopt.bench.conv_problem import ConvProblem, ConvWeight
from xopt.bench.conv_shapes import DTYPES, ConvShape
from xopt.bench.peers import ONEDNN, OURS, Call, Contender, Packed, find_op, require_onednn

EAGER = "F.conv2d"
OURS_END = "xopt + bias + residual + relu"
OURS_APART = "xopt + bias, then add, then relu"
ONEDNN_END = "oneDNN + bias + residual + relu"

PEERS = (EAGER, ONEDNN)
ENDS = (OURS_END, OURS_APART, ONEDNN_END)
END = "bias_residual_relu"


def _geometry(shape: ConvShape) -> tuple[list[int], list[int], list[int], int]:
    """Padding, stride, dilation and groups, in the order that oneDNN's op takes."""
    return [shape.padding] * 2, [shape.stride] * 2, [1, 1], 1


# ---- torch.nn.functional.conv2d -------------------------------------------------------------------------------------


def _eager_pack(weight: ConvWeight, m: int) -> Packed:
    return weight.values.clone(memory_format=torch.channels_last)


def _eager_bind(problem: ConvProblem) -> Call:
    values, stride, padding = problem.input, problem.shape.stride, problem.shape.padding
    return lambda packed: torch.nn.functional.conv2d(values, packed, None, stride, padding)


# ---- oneDNN ---------------------------------------------------------------------------------------------------------


def _onednn_pack(weight: ConvWeight, m: int) -> Packed:
    require_onednn(weight.dtype)
    shape = weight.shape
    size = [shape.batch, shape.channels, shape.height, shape.width]
    return find_op("mkldnn._reorder_convolution_weight.default")(weight.values, *_geometry(shape), size)


def _onednn_bind(problem: ConvProblem) -> Call:
    op, values, geometry = find_op("mkldnn._convolution_pointwise.default"), problem.input, _geometry(problem.shape)
    return lambda packed: op(values, packed, None, *geometry, "none", [], "")


def _onednn_end_bind(problem: ConvProblem) -> Call:
    op = find_op("mkldnn._convolution_pointwise.binary")
    values, residual, bias, geometry = problem.input, problem.residual, problem.weight.bias, _geometry(problem.shape)
    return lambda packed: op(values, residual, packed, bias, *geometry, "add", 1.0, "relu", [], "")


# ---- xopt -----------------------------------------------------------------------------------------------------------


def _our_pack(weight: ConvWeight, m: int) -> Packed:
    return find_op("xopt.conv_pack.default")(weight.values, dtype=weight.values.dtype)


def _our_bind(problem: ConvProblem, **epilogue: Any) -> Call:
    op, values, size = find_op("xopt.conv.default"), problem.input, problem.weight.values.shape
    padding, stride, dilation, groups = _geometry(problem.shape)
    around = [amount for amount in padding for _ in range(2)]  # before and after
    geometry: Any = {"stride": stride, "padding": around, "dilation": dilation, "groups": groups}
    return lambda packed: op(values, packed, size, **geometry, **epilogue)


def _our_end_bind(problem: ConvProblem) -> Call:
    epilogue: Any = {"binary": "add", "activation": "relu", "activation_last": True}
    return _our_bind(problem, bias=problem.weight.bias, other=problem.residual, **epilogue)


def _our_apart_bind(problem: ConvProblem) -> Call:
    conv, residual = _our_bind(problem, bias=problem.weight.bias), problem.residual
    return lambda packed: torch.nn.functional.relu(conv(packed) + residual)


ALL = (
    Contender(OURS, DTYPES, _our_pack, _our_bind, layout="xopt"),
    Contender(EAGER, DTYPES, _eager_pack, _eager_bind, layout="plain"),
    Contender(ONEDNN, DTYPES, _onednn_pack, _onednn_bind, layout="onednn"),
    Contender(OURS_END, DTYPES, _our_pack, _our_end_bind, layout="xopt", epilogue=END),
    Contender(OURS_APART, DTYPES, _our_pack, _our_apart_bind, layout="xopt", epilogue=END),
    Contender(ONEDNN_END, DTYPES, _onednn_pack, _onednn_end_bind, layout="onednn", epilogue=END),
)


def contenders(dtype: str, shape: ConvShape) -> list[Contender]:
    return [one for one in ALL if dtype in one.dtypes and (shape.ends_block or one.epilogue == "none")]
