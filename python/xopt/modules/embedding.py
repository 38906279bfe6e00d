"""nn.Embedding with its table in the optimized dtype: half the memory, and where bf16 begins to flow."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from xopt.modules.base import Context, Replacement, cast_parameter, derive, own_forward, plain_parameter_problem


class CastEmbedding(Replacement, nn.Embedding):
    source: ClassVar[type[nn.Module]] = nn.Embedding
    switch: ClassVar[str] = "cast_embeddings"

    _xopt_source_dtype: torch.dtype

    @classmethod
    def why_not(cls, module: nn.Embedding, context: Context) -> str | None:
        if own_forward(module, nn.Embedding):
            return "it has a forward of its own"
        if module.max_norm is not None:
            return "max_norm changes its weight in every call"
        return plain_parameter_problem(module, "weight")

    @classmethod
    def replace(cls, module: nn.Embedding, context: Context) -> str:
        module.__dict__["_xopt_source_dtype"] = module.weight.dtype
        module._parameters["weight"] = cast_parameter(module.weight, context)
        module.__class__ = derive(cls, type(module))
        return f"cast to {str(module.weight.dtype).removeprefix('torch.')}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = super().forward(input)
        # Outside of autocast it has no input that could say which dtype is wanted.
        return rows if torch.is_autocast_enabled("cpu") else rows.to(self._xopt_source_dtype)
