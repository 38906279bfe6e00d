"""nn.Embedding and nn.EmbeddingBag with their tables in the optimized dtype: half the memory, and where bf16 begins to
flow. A table that is a linear layer's weight too (a language model's head) is packed, and rows are read out of that.
"""

from __future__ import annotations

import dis
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.autocast import autocast_dtype
from xopt.graph.symbol import Symbol, recorder_of
from xopt.modules.base import (
    Context,
    Replacement,
    cast_parameter,
    derive,
    dtype_name,
    own_forward,
    plain_parameter_problem,
)
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import step

_packed_rows = torch.ops.xopt.packed_rows.default


class CastEmbedding(Replacement, PackedState, nn.Embedding):
    """A subclass whose own forward goes on to nn.Embedding's (scaled embeddings) keeps that forward."""

    source: ClassVar[type[nn.Module]] = nn.Embedding
    switch: ClassVar[str] = "cast_embeddings"
    reads_packed: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = True

    _xopt_source_dtype: torch.dtype

    @classmethod
    def why_not(cls, module: nn.Embedding, context: Context) -> str | None:
        if "forward" in module.__dict__ or not _goes_on(type(module)):
            return "it has a forward of its own"
        return _table_problem(module)

    @classmethod
    def replace(cls, module: nn.Embedding, context: Context) -> str:
        weight: Any = module.weight
        module.__dict__["_xopt_source_dtype"] = weight.dtype
        module.__class__ = derive(cls, type(module), below=own_forward(module, nn.Embedding))
        if id(weight) in context.packed:
            module._parameters["weight"] = context.pack(weight)
            return "reads the packed weight of the linear layer that it shares it with"
        module._parameters["weight"] = cast_parameter(weight, context)
        return f"cast to {dtype_name(module.weight.dtype)}"

    def forward(self, input: Any) -> torch.Tensor:
        if type(input) is Symbol and type(self._parameters["weight"]) is PackedParameter:
            rows = recorder_of(input).call_module(self, packed_rows, input)
        else:
            rows = packed_rows(self, input)
        return _in_wanted_dtype(rows, self._xopt_source_dtype)


@step("")
def packed_rows(module: CastEmbedding, input: torch.Tensor) -> torch.Tensor:
    weight = module._parameters["weight"]
    if type(weight) is not PackedParameter or not weight.is_packed_alone or not weight.packed.is_cpu:
        return functional.embedding(input, module.weight, module.padding_idx)
    return _packed_rows(weight.packed, input, *weight.shape, weight.dtype)  # type: ignore[no-any-return]


class CastEmbeddingBag(Replacement, nn.EmbeddingBag):
    source: ClassVar[type[nn.Module]] = nn.EmbeddingBag
    switch: ClassVar[str] = "cast_embeddings"

    _xopt_source_dtype: torch.dtype

    @classmethod
    def why_not(cls, module: nn.EmbeddingBag, context: Context) -> str | None:
        if own_forward(module, nn.EmbeddingBag):
            return "it has a forward of its own"
        return _table_problem(module)

    @classmethod
    def replace(cls, module: nn.EmbeddingBag, context: Context) -> str:
        module.__dict__["_xopt_source_dtype"] = module.weight.dtype
        module._parameters["weight"] = cast_parameter(module.weight, context)
        module.__class__ = derive(cls, type(module))
        return f"cast to {dtype_name(module.weight.dtype)}"

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> torch.Tensor:
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(self.weight.dtype)
        bags = super().forward(input, offsets, per_sample_weights)
        return _in_wanted_dtype(bags, self._xopt_source_dtype)


def _table_problem(module: Any) -> str | None:
    if module.max_norm is not None:
        return "max_norm changes its weight in every call"
    return plain_parameter_problem(module, "weight")


def _in_wanted_dtype(rows: torch.Tensor, source_dtype: torch.dtype) -> torch.Tensor:
    """Outside of autocast it has no input that could say which dtype is wanted."""
    return rows.to(source_dtype) if autocast_dtype(rows.device) is None else rows


def _goes_on(kind: type[nn.Module]) -> bool:
    """Whether a class has nn.Embedding's forward, or one of its own that calls it and does not read the weight itself:
    neither it nor a class between."""
    for each in kind.__mro__[: kind.__mro__.index(nn.Embedding)]:
        own = each.__dict__.get("forward")
        code = getattr(own, "__code__", None)
        if own is not None and (code is None or "__class__" not in code.co_freevars or _reads_weight(code)):
            return False
    return True


def _reads_weight(code: Any) -> bool:
    """More than its dtype or device, that is: those are right of a packed one too."""
    instructions = [step for step in dis.get_instructions(code) if step.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    following = [step.argval for step in instructions[1:]] + [None]
    return any(
        step.argval == "weight" and then not in ("dtype", "device", "shape")
        for step, then in zip(instructions, following, strict=True)
    )
