"""Operands for a recorded call: random values of its shapes, dtypes and strides, and weights packed as it has them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from xopt.bench.errors import UnavailableError
from xopt.bench.peers import find_op
from xopt.bench.recurrent_operands import fill_recurrent

Named = dict[str, Any]
DTYPES = {
    **{"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64},
    **{"s8": torch.int8, "u8": torch.uint8, "s32": torch.int32, "s64": torch.int64, "bool": torch.bool},
}
SEED = 7
_HEADER_BYTES = 64
_PANEL_COLUMNS = 32
_LINE_BYTES = 64
_CODED_TERMS = 32  # of which groups of a weight-only product are multiples
_USUAL_GROUPS = (32, 64, 128)
_VARIANCES = ("variance", "running_var")


def dtype_of(name: str) -> torch.dtype:
    found = DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnavailableError(f"operands of dtype {name} cannot be made")
    return found


def operands_of(kernel: dict[str, Any]) -> Named:
    """By the names of the operator's schema, with memory of their own and the same values each time."""
    named: Named = dict(kernel["arguments"])
    if not named:
        raise UnavailableError("its arguments were not recorded")
    generator = torch.Generator().manual_seed(SEED)
    rows = _rows_to_choose_from(named)
    made = {name: _value(name, value, generator, rows) for name, value in named.items()}
    if kernel["operator"].startswith("xopt::"):
        named["computed in"] = kernel["dtype"]  # which is the packed weight's dtype, and need not be the input's
        _pack_weights(kernel["operator"].removeprefix("xopt::"), made, named, generator)
    return made


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "shape" in value


def _value(name: str, value: Any, generator: torch.Generator, rows: int) -> Any:
    if is_tensor(value):
        made = _tensor(value, generator, _bounds(name, dtype_of(value["dtype"]), rows))
        return made.abs() if name in _VARIANCES else made
    if isinstance(value, dict) and "memory_format" in value:
        return getattr(torch, value["memory_format"])
    if isinstance(value, dict):
        return dtype_of(value["dtype"])
    if isinstance(value, list):
        return [_value(name, item, generator, rows) for item in value]
    return value


def _rows_to_choose_from(named: Named) -> int:
    """How far an index may go: the rows of the smallest table."""
    tables = [value["shape"][0] for value in named.values() if is_tensor(value) and len(value["shape"]) > 1]
    return max(min(tables, default=1), 1)


def _bounds(name: str, dtype: torch.dtype, rows: int) -> tuple[int, int]:
    """Of the whole numbers that an argument may have: the least, and that after the largest."""
    if name.endswith("zero_point"):
        return 0, 128  # which both int8 types hold
    return {torch.int8: (-127, 128), torch.uint8: (0, 256)}.get(dtype, (0, rows))


def _tensor(described: dict[str, Any], generator: torch.Generator, bounds: tuple[int, int]) -> torch.Tensor:
    dtype, shape, strides = dtype_of(described["dtype"]), described["shape"], described["strides"]
    # A stride of 0 repeats what is there once.
    held = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    if dtype.is_floating_point:
        values = torch.randn(held, generator=generator).to(dtype)
    elif dtype == torch.bool:
        values = torch.ones(held, dtype=dtype)
    else:
        values = torch.randint(*bounds, held, generator=generator).to(dtype)
    return torch.empty_strided(held, strides, dtype=dtype).copy_(values).expand(shape)


# ---- Packed weights --------------------------------------------------------------------------------------------------


def _columns(named: Named, itemsize: int) -> int:
    """Of the whole packed weight, of which a call may take a part."""
    terms, asked = named["input"]["shape"][-1], int(named["out_features"])
    panel = -(-terms * itemsize // _LINE_BYTES) * 2 * 1024
    held = (named["packed"]["shape"][0] - _HEADER_BYTES) // panel * _PANEL_COLUMNS
    return asked if -(-asked // _PANEL_COLUMNS) * _PANEL_COLUMNS == held else held


def _packed(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    made: torch.Tensor = find_op(f"xopt.{op}.default")(*args, **kwargs)
    return made


def _pack_linear(named: Named, generator: torch.Generator) -> torch.Tensor:
    dtype = dtype_of(named["computed in"])
    size = _columns(named, dtype.itemsize), named["input"]["shape"][-1]
    return _packed("linear_pack", torch.randn(size, generator=generator).to(dtype), dtype=dtype)


def _pack_gated(named: Named, generator: torch.Generator) -> torch.Tensor:
    dtype, size = dtype_of(named["computed in"]), (int(named["out_features"]), named["input"]["shape"][-1])
    pair = [torch.randn(size, generator=generator).to(dtype) for _ in range(2)]
    return _packed("linear_pack_gated", *pair, dtype=dtype)


def _pack_int8(named: Named, generator: torch.Generator) -> torch.Tensor:
    size = int(named["out_features"]), named["input"]["shape"][-1]
    values = torch.randint(-127, 128, size, dtype=torch.int8, generator=generator)
    return _packed("linear_pack_int8", values, torch.full((size[0],), 0.01))


def _pack_conv(named: Named, generator: torch.Generator) -> torch.Tensor:
    dtype = dtype_of(named["computed in"])
    values = torch.randn(named["weight_size"], generator=generator).to(dtype)
    return _packed("conv_pack", values, int(named.get("groups") or 1), dtype=dtype)


def _pack_conv_int8(named: Named, generator: torch.Generator) -> torch.Tensor:
    values = torch.randint(-127, 128, named["weight_size"], dtype=torch.int8, generator=generator)
    return _packed("conv_pack_int8", values, torch.full((1,), 0.01), None, int(named.get("groups") or 1))


def _pack_conv_transpose(named: Named, generator: torch.Generator) -> torch.Tensor:
    dtype = dtype_of(named["computed in"])
    values = torch.randn(named["weight_size"], generator=generator).to(dtype)
    geometry: Any = {"stride": named["stride"], "dilation": named["dilation"]}
    return _packed("conv_transpose_pack", values, int(named.get("groups") or 1), **geometry, dtype=dtype)


def _pack_table(named: Named, generator: torch.Generator) -> torch.Tensor:
    dtype = dtype_of(named["dtype"]["dtype"])
    values = torch.randn(int(named["out_features"]), int(named["in_features"]), generator=generator).to(dtype)
    return _packed("linear_pack", values, dtype=dtype)


def _pack_weight_only(named: Named, generator: torch.Generator) -> torch.Tensor:
    """The plainest that has the recorded size: bits and groups are in the packed bytes alone."""
    columns, terms, held = int(named["out_features"]), named["input"]["shape"][-1], named["packed"]["shape"][0]
    whole = range(_CODED_TERMS, terms, _CODED_TERMS)
    groups = sorted(whole, key=lambda group: group not in _USUAL_GROUPS)
    gated = bool(named.get("gated"))
    rows = columns * (2 if gated else 1)
    for bits, group, offset in itertools.product((4, 8), (*groups, terms), (False, True)):
        shapes = [(rows, terms), (rows, -(-terms // group))]
        options: Any = {"bits": bits, "group_size": group, "gated": gated}
        on_meta = [
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(shapes, (torch.int8, torch.float32), strict=True)
        ]
        zeros = torch.zeros(shapes[1], dtype=torch.int32) if offset else None
        shaped = _packed("linear_pack_weight_only", *on_meta, None if zeros is None else zeros.to("meta"), **options)
        if shaped.shape[0] == held:
            codes = torch.randint(-7, 8, shapes[0], dtype=torch.int8, generator=generator)
            return _packed("linear_pack_weight_only", codes, torch.full(shapes[1], 0.01), zeros, **options)
    raise UnavailableError(f"no weight of 4 or 8 bits for {columns} x {terms} is packed into {held} bytes")


_PACKERS: dict[str, Callable[[Named, torch.Generator], torch.Tensor]] = {
    "linear": _pack_linear,
    "linear_norm": _pack_linear,
    "linear_gated": _pack_gated,
    "linear_weight_only": _pack_weight_only,
    "qlinear": _pack_int8,
    "conv": _pack_conv,
    "qconv": _pack_conv_int8,
    "conv_transpose": _pack_conv_transpose,
    "packed_rows": _pack_table,
}


def _pack_weights(op: str, made: Named, named: Named, generator: torch.Generator) -> None:
    if op == "recurrent":
        fill_recurrent(made, named, dtype_of(named["computed in"]))
    elif op in _PACKERS:
        made["packed"] = _PACKERS[op](named, generator)
    elif op == "chain":
        raise UnavailableError("a chain is replayed call by call, as profiles of a model have it")
    elif any("packed" in name for name in named):
        raise UnavailableError(f"how xopt::{op}'s weights are packed is not known to the bench")
