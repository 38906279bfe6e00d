"""The contenders of the model bench: what each makes of a model in fp32, called as a user would call it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xopt.bench.errors import UnavailableError

OURS = "xopt"
Inputs = dict[str, Any]
Call = Callable[[Inputs], torch.Tensor]
LIBRARIES = {"openvino": "openvino", "ipex": "intel_extension_for_pytorch"}
NEEDS = {"compile": "torch._inductor.compile_fx", **LIBRARIES}


@dataclass(frozen=True)
class Prepared:
    call: Call
    note: str = ""
    """What a reader of its times must know."""


def is_installed(peer: str) -> bool:
    return peer not in LIBRARIES or importlib.util.find_spec(LIBRARIES[peer]) is not None


def load(peer: str) -> None:
    """Imports what the contender needs: none of them is to pay for that in its set-up time."""
    if peer in NEEDS:
        importlib.import_module(NEEDS[peer])


def first_output(result: Any) -> torch.Tensor:
    tensor = result if isinstance(result, torch.Tensor) else result[0]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: _cast_one(value, dtype) for name, value in inputs.items()}


def _cast_one(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def xopt(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Prepared:
    import xopt as library

    optimized = library.optimize(model, dtype=dtype, inplace=True)
    return Prepared(lambda given: first_output(optimized(**given)))


def eager(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Prepared:
    model = model.to(dtype)
    return Prepared(lambda given: first_output(model(**cast(given, dtype))))


def compile(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Prepared:
    """torch.compile with freezing, which packs weights."""
    import torch._inductor.config as inductor

    torch.compiler.reset()  # of what another model left behind in this process
    inductor.freezing = True
    compiled = torch.compile(model.to(dtype))
    return Prepared(lambda given: first_output(compiled(**cast(given, dtype))))


class _Positional(nn.Module):
    """For libraries that trace: tensors in by place, one tensor out."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model = model
        self.names = _names_of_tensors(inputs)
        self.options = {name: value for name, value in inputs.items() if name not in self.names}

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return first_output(self.model(**dict(zip(self.names, tensors, strict=True)), **self.options))


def _names_of_tensors(inputs: Inputs) -> list[str]:
    return [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]


def _in_order(names: list[str], given: Inputs) -> tuple[torch.Tensor, ...]:
    return tuple(given[name] for name in names)


OPENVINO_DTYPES = {torch.bfloat16: ("bf16", "BF16"), torch.float16: ("f16", "FP16"), torch.float32: ("f32", "FP32")}


def openvino(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Prepared:
    _refuse_cache(inputs)
    library: Any = importlib.import_module("openvino")
    precision, capability = OPENVINO_DTYPES[dtype]
    note = ""
    if capability not in library.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        # Asked for it all the same, it takes reference kernels, twenty times slower: nobody would use it so.
        note = f"runs in f32: it has no {precision} on this CPU"
        precision = "f32"
    inputs = _with_mask(inputs)
    names = _names_of_tensors(inputs)
    example = _in_order(names, inputs)
    shapes = [list(tensor.shape) for tensor in example]  # fixed ones are the faster
    converted = library.convert_model(_Positional(model, inputs), example_input=example, input=shapes)
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = library.compile_model(converted, "CPU", options)
    # Nothing here holds on to the model: a user would let go of it, too.
    return Prepared(lambda given: torch.from_numpy(compiled(_in_order(names, _with_mask(given)))[0]), note)


def ipex(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Prepared:
    _refuse_cache(inputs)
    library: Any = importlib.import_module("intel_extension_for_pytorch")
    plain = _Positional(library.optimize(model, dtype=dtype), inputs)
    names = plain.names
    script: Any = torch.jit
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        traced = script.freeze(script.trace(plain, _in_order(names, inputs), strict=False, check_trace=False))
    return Prepared(lambda given: first_output(traced(*_in_order(names, given))))


def _refuse_cache(inputs: Inputs) -> None:
    if "past_key_values" in inputs:
        raise UnavailableError("left out: a key-value cache object does not go through its conversion")


def _with_mask(inputs: Inputs) -> Inputs:
    """A mask of ones, as tokenizers give it. Without one, transformers' decoders use operators it does not convert."""
    if "use_cache" not in inputs:
        return inputs
    return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


PEERS: dict[str, Callable[[nn.Module, Inputs, torch.dtype], Prepared]] = {
    OURS: xopt,
    "eager": eager,
    "compile": compile,
    "openvino": openvino,
    "ipex": ipex,
}
