"""The contenders of the model bench: what each makes of a model in fp32, called as a user would call it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xopt.bench.errors import UnavailableError

OURS = "xopt"
Inputs = dict[str, Any]
Call = Callable[[Inputs], torch.Tensor]
LIBRARIES = {"openvino": "openvino", "ipex": "intel_extension_for_pytorch"}


def is_installed(peer: str) -> bool:
    return peer not in LIBRARIES or importlib.util.find_spec(LIBRARIES[peer]) is not None


def first_output(result: Any) -> torch.Tensor:
    tensor = result if isinstance(result, torch.Tensor) else result[0]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: _cast_one(value, dtype) for name, value in inputs.items()}


def _cast_one(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def xopt(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Call:
    import xopt as library

    optimized = library.optimize(model, dtype=dtype, inplace=True)
    return lambda given: first_output(optimized(**given))


def eager(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Call:
    model = model.to(dtype)
    return lambda given: first_output(model(**cast(given, dtype)))


def compile(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Call:
    """torch.compile with freezing, which packs weights."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    compiled = torch.compile(model.to(dtype))
    return lambda given: first_output(compiled(**cast(given, dtype)))


class _Positional(nn.Module):
    """For libraries that trace: tensors in by place, one tensor out."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model = model
        self.names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        self.options = {name: value for name, value in inputs.items() if name not in self.names}

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return first_output(self.model(**dict(zip(self.names, tensors, strict=True)), **self.options))

    def tensors(self, given: Inputs) -> tuple[torch.Tensor, ...]:
        return tuple(given[name] for name in self.names)


def openvino(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Call:
    _refuse_cache(inputs)
    library: Any = importlib.import_module("openvino")
    plain = _Positional(model, inputs)
    options = {
        "INFERENCE_PRECISION_HINT": "bf16" if dtype == torch.bfloat16 else "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = library.compile_model(library.convert_model(plain, example_input=plain.tensors(inputs)), "CPU", options)
    return lambda given: torch.from_numpy(compiled(plain.tensors(given))[0])


def ipex(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Call:
    _refuse_cache(inputs)
    library: Any = importlib.import_module("intel_extension_for_pytorch")
    plain = _Positional(library.optimize(model, dtype=dtype), inputs)
    script: Any = torch.jit
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        traced = script.freeze(script.trace(plain, plain.tensors(inputs), strict=False, check_trace=False))
    return lambda given: first_output(traced(*plain.tensors(given)))


def _refuse_cache(inputs: Inputs) -> None:
    if "past_key_values" in inputs:
        raise UnavailableError("it does not take a key-value cache object")


PEERS: dict[str, Callable[[nn.Module, Inputs, torch.dtype], Call]] = {
    OURS: xopt,
    "eager": eager,
    "compile": compile,
    "openvino": openvino,
    "ipex": ipex,
}
