"""The fake of `packed_rows`."""

from __future__ import annotations

import torch

from xopt.ops.costs import Shape, Work, cost_of, joined
from xopt.ops.fakes import Size, Tensor, fake_of


@fake_of("packed_rows")
def _packed_rows(packed: Tensor, indices: Tensor, out_features: Size, in_features: Size, dtype: torch.dtype) -> Tensor:
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"xopt::packed_rows: indices: expected dtype int64 or int32, got {indices.dtype}")
    return packed.new_empty((*indices.shape, in_features), dtype=dtype)


@cost_of("packed_rows", category="embedding", kernel="packed_rows")
def _packed_rows_work(packed: Shape, indices: Shape, out_features: int, in_features: int, *others: object) -> Work:
    return Work(f"{joined(indices)} of {out_features}x{in_features}")
