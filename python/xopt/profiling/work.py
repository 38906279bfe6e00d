"""What a call computes: its problem's size, floating point operations, bytes that have to move, and its name in full.

Formulas are those of flop_counter, which has xopt's own operators too (`xopt.ops.costs`); what a formula has to be told
about outputs, and their bytes, is found by running the operator on tensors without memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

import xopt
from xopt.profiling.calls import Call
from xopt.profiling.category import ATTENTION, CONV, EMBEDDING, GEMM, REORDER, find_operator
from xopt.profiling.events import Op, TensorArgument, dtype_name, dtype_of_name

OTHER_LAYOUT = ", other layout"
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_")


@dataclass(frozen=True)
class Work:
    name: str
    dtype: str
    """Of what is multiplied, or of the first tensor; "" where there is none."""
    flop: int
    bytes: int
    """Inputs and outputs, each once."""
    complete: bool
    """False: outputs are not known, and not counted."""


def work_of(call: Call) -> Work:
    op = call.op
    assert op is not None
    if not call.absorbs:
        return Work(call.name, "", 0, 0, False)
    outputs = _outputs(op, tuple(call.names))
    moved = _moved_bytes(call, op, outputs)
    dtype = next((value.dtype for value in tensors_in(op.arguments)), "")
    if op.name.startswith("xopt::"):
        name, dtype, flop = _our_name(call, op, dtype)
    else:
        name, flop = _their_name(call, op, dtype, outputs), _their_flop(op)
    return Work(name, dtype, flop, moved, outputs is not None)


def tensors_in(arguments: list[Any]) -> list[TensorArgument]:
    found = []
    for value in arguments:
        if isinstance(value, TensorArgument):
            found.append(value)
        elif isinstance(value, list):
            found += [item for item in value if isinstance(item, TensorArgument)]
    return found


def bound_arguments(
    op: Op, names: tuple[str, ...], value_of: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """The call's arguments as its operator takes them, with `value_of` in the place of each tensor; None: unknown."""
    operator = find_operator(op.name, op.overload)
    if operator is None or len(operator._schema.arguments) < len(op.arguments):
        return None
    args, kwargs, left = [], {}, list(names)
    for argument, value in zip(operator._schema.arguments, op.arguments, strict=False):
        bound: Any
        if isinstance(value, TensorArgument):
            bound = value_of(value)
        elif isinstance(value, list):
            bound = [value_of(item) if isinstance(item, TensorArgument) else item for item in value]
        else:
            bound = value
        if str(argument.type) in ("str", "Optional[str]"):
            if not left and not argument.has_default_value():
                return None
            bound = left.pop(0) if left else argument.default_value
        elif argument.name.endswith("dtype") and isinstance(bound, int):
            bound = _DTYPE_CODES.get(bound)
        elif argument.name == "memory_format" and isinstance(bound, int):
            bound = _MEMORY_FORMATS.get(bound)
        elif argument.name in ("layout", "device", "generator", "pin_memory"):
            bound = None
        elif bound is None and argument.has_default_value():
            bound = argument.default_value
        if argument.kwarg_only:
            if bound is not None:
                kwargs[argument.name] = bound
        else:
            args.append(bound)
    return args, kwargs


def _our_name(call: Call, op: Op, dtype: str) -> tuple[str, str, int]:
    """`linear[bf16,amx]+bias+gelu_erf 128x3072x768`, the dtype that it computes in, and its operations."""
    short = op.name.removeprefix("xopt::")
    cost = xopt.ops.costs.COSTS.get(short)
    bound = bound_arguments(op, tuple(call.names), lambda tensor: tensor.shape)
    size, flop, level = "", 0, ""
    if cost is not None and bound is not None:
        work = cost.work(*bound[0], **bound[1])
        size, flop = work.size, work.flop
        asked = next((value for value in bound[0] if isinstance(value, torch.dtype)), None)  # of packed rows
        dtype = dtype if asked is None else dtype_name(asked)
        if work.itemsizes and dtype_of_name(dtype).itemsize not in work.itemsizes:
            dtype = "bf16" if torch.bfloat16.itemsize in work.itemsizes else "f32"
        level = _level(work.kernel or cost.kernel, dtype)
    inside = ",".join(part for part in (dtype, call.instance or level) if part)
    return f"{short}[{inside}]{_epilogue(call, op)} {size}".strip(), dtype, flop


@functools.cache
def _level(kernel: str, dtype: str) -> str:
    """The level that runs a kernel now. Kernels that compute in fp32 whatever the dtype are registered as such."""
    chosen = {record.dtype: record.isa for record in xopt.kernels() if record.name == kernel and record.chosen}
    return chosen.get(dtype) or chosen.get("u8s8" if dtype == "u8" else "s8s8" if dtype == "s8" else "f32", "")


def _epilogue(call: Call, op: Op) -> str:
    """What an operator does beside its main work: its optional tensors and the names that it was given."""
    operator = find_operator(op.name, op.overload)
    if operator is None:
        return ""
    parts, names = [], list(call.names)
    for argument, value in zip(operator._schema.arguments, op.arguments, strict=False):
        kind = str(argument.type)
        if kind == "str":
            name = names.pop(0) if names else "none"
            parts.append("" if name == "none" else name)
        elif kind == "Optional[Tensor]" and isinstance(value, TensorArgument):
            plain = argument.name in ("other", "weight", "input_zero_point") or argument.name.startswith("norm_")
            parts.append("" if plain else argument.name)
    return "".join(f"+{part}" for part in parts if part)


_TENSORS = tuple[int, ...]


def _their_name(call: Call, op: Op, dtype: str, outputs: list[torch.Tensor] | None) -> str:
    short = op.name.rpartition("::")[2]
    shapes = [tensor.shape for tensor in tensors_in(op.arguments)]
    if not dtype:
        return short
    if call.category == REORDER and outputs and dtype_name(outputs[0].dtype) != dtype:
        dtype = f"{dtype} to {dtype_name(outputs[0].dtype)}"
    elif call.category == REORDER and short == "copy_" and len(shapes) > 1:
        source = tensors_in(op.arguments)[1]
        dtype = dtype if source.dtype == dtype else f"{source.dtype} to {dtype}"
    layout = OTHER_LAYOUT if call.category == REORDER and _changes_layout(op, short, outputs) else ""
    return f"{short}[{dtype}] {_size(call, short, shapes, outputs)}{layout}".strip()


def _changes_layout(op: Op, short: str, outputs: list[torch.Tensor] | None) -> bool:
    """Whether what a copy reads lies in another order than what it writes."""
    if "reorder" in short or "mkldnn" in short:
        return True
    tensors = tensors_in(op.arguments)
    if short == "copy_" and len(tensors) > 1:
        sides = [(tensor.shape, tensor.strides) for tensor in tensors[:2]]
    elif outputs and len(tensors) == 1 and tuple(outputs[0].shape) == tensors[0].shape:
        sides = [(tensors[0].shape, tensors[0].strides), (tensors[0].shape, outputs[0].stride())]
    else:
        return False
    if sides[0][0] != sides[1][0] or any(0 in strides for _, strides in sides):
        return False
    return _order(*sides[0]) != _order(*sides[1])


def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Dimensions from the outermost in memory to the innermost; those of size 1 are anywhere."""
    return sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -strides[dim])


def _size(call: Call, short: str, shapes: list[_TENSORS], outputs: list[torch.Tensor] | None) -> str:
    joined = xopt.ops.costs.joined
    columns: int
    if call.category == GEMM and "addmm" in short and len(shapes) > 2:
        shapes = shapes[1:]
    if call.category == GEMM and len(shapes) > 1 and len(shapes[0]) >= 2 <= len(shapes[1]):
        rows, columns = shapes[0], shapes[1][-1]
        if "linear" in short and outputs:
            columns = outputs[0].shape[-1]
        if "linear" in short:
            return f"{xopt.ops.costs.rows_of(rows)}x{columns}x{rows[-1]}"
        batch = f"{joined(rows[:-2])}x" if len(rows) > 2 else ""
        return f"{batch}{rows[-2]}x{columns}x{rows[-1]}"
    if call.category == CONV and len(shapes) > 1:
        return f"{joined(shapes[0])}, {joined(shapes[1][2:])} to {shapes[1][0]}"
    if call.category == ATTENTION and len(shapes) > 1 and len(shapes[0]) == 4:
        return f"{joined(shapes[0][:3])}x{shapes[1][-2]}x{shapes[0][-1]}"
    largest = max(shapes, key=lambda shape: torch.Size(shape).numel(), default=())
    return joined(largest)


# ---- Operations ------------------------------------------------------------------------------------------------------


def _linear_flop(input: Any, weight: Any, *others: Any, out_val: Any = None, **options: Any) -> int:
    return int(2 * torch.Size(input).numel() * (out_val[-1] if out_val else 0))


def _packed_conv_flop(
    input: Any, weight: Any, bias: Any, padding: Any, stride: Any, dilation: Any, *others: Any, out_val: Any = None
) -> int:
    return int(2 * torch.Size(out_val or ()).numel() * torch.Size(weight[1:]).numel()) if out_val else 0


# Operators for CPUs that flop_counter does not have.
_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value, *others, **options: int(
        sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    ),
    "mkldnn::_linear_pointwise": _linear_flop,
    "mkl::_mkl_linear": _linear_flop,
    "mkldnn::_convolution_pointwise": _packed_conv_flop,
}


def _their_flop(op: Op) -> int:
    """Of the operator, or else of what it calls."""
    formula = _FORMULAS.get(op.name)
    if formula is None:
        operator = find_operator(op.name, op.overload)
        formula = flop_registry.get(operator.overloadpacket) if operator is not None else None
    if formula is None:
        return sum(_their_flop(child) for child in op.children)
    bound = bound_arguments(op, (), lambda tensor: tensor.shape)
    if bound is None:
        return 0
    outputs = _outputs(op, ())
    shape = tuple(outputs[0].shape) if outputs else None
    args, kwargs = bound
    return int(formula(*args, **kwargs, out_val=shape))


# ---- Bytes -----------------------------------------------------------------------------------------------------------


def _moved_bytes(call: Call, op: Op, outputs: list[torch.Tensor] | None) -> int:
    operator = find_operator(op.name, op.overload)
    written = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in (operator._schema.arguments if operator is not None else ())
    ]
    made = sum(tensor.nbytes for tensor in outputs or ())
    read = 0
    for place, value in enumerate(op.arguments):
        size = sum(tensor.bytes for tensor in tensors_in([value]))
        changed = place < len(written) and written[place]
        both = changed and not op.name.endswith(_OVERWRITES) and not op.overload.endswith("out")
        read += 2 * size if both else size
    if call.category == EMBEDDING:  # only the rows that are asked for
        indices = [tensor.bytes for tensor in tensors_in(op.arguments) if tensor.dtype in ("s64", "s32")]
        read = min(read, sum(indices) + made)
    return read + made


def _outputs(op: Op, names: tuple[str, ...]) -> list[torch.Tensor] | None:
    """The tensors that a call made, without their memory; None where that cannot be told."""
    operator = find_operator(op.name, op.overload)
    if operator is None:
        return None
    if all(each.alias_info is not None for each in operator._schema.returns):
        return []
    return _run_without_memory(op.name, op.overload, _Frozen(op), names)


class _Frozen:
    """An operator's call, to be looked up by its arguments."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self._key = repr(op.arguments)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and other._key == self._key


@functools.lru_cache(maxsize=4096)
def _run_without_memory(name: str, overload: str, call: _Frozen, names: tuple[str, ...]) -> list[torch.Tensor] | None:
    bound = bound_arguments(call.op, names, _meta)
    if bound is None:
        return None
    try:
        with torch.no_grad():
            result = find_operator(name, overload)(*bound[0], **bound[1])
    except Exception:  # whatever an operator says of arguments that the profiler did not record in full
        return None
    results = result if isinstance(result, (tuple, list)) else [result]
    return [each for each in results if isinstance(each, torch.Tensor)]


def _meta(tensor: TensorArgument) -> torch.Tensor:
    dtype = dtype_of_name(tensor.dtype)
    if len(tensor.strides) != len(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return torch.empty_strided(tensor.shape, tensor.strides, dtype=dtype, device="meta")


# c10::ScalarType's numbers, which the profiler tells in the place of dtypes.
_DTYPE_CODES = {
    **{0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64},
    **{5: torch.float16, 6: torch.float32, 7: torch.float64, 11: torch.bool, 15: torch.bfloat16},
}
# c10::MemoryFormat's numbers, likewise.
_MEMORY_FORMATS = dict(
    enumerate((torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d))
)
