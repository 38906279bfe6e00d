"""xopt::packed_rows: bit for bit the rows of the weight that was packed."""

from __future__ import annotations

import pytest
import torch

import xopt  # noqa: F401 - loads the operators

ops = torch.ops.xopt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (33, 31), (40, 64), (100, 257), (17, 1000), (5, 0)])
def test_rows_are_the_weights(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    weight = torch.randn(shape, generator=generator).to(dtype)
    packed = ops.linear_pack(weight, dtype=dtype)
    for count in ((), (1,), (3, 50)):
        indices = torch.randint(0, shape[0], count, generator=generator)
        for form in (
            indices,
            indices.int(),
            indices.expand(2, *count),
            indices.repeat_interleave(2).unflatten(0, (-1, 2))[:, 0],
        ):
            rows = ops.packed_rows(packed, form, *shape, dtype)
            assert rows.is_contiguous()
            assert torch.equal(rows, weight[form.long()])


def test_every_row_of_a_large_table() -> None:
    weight = torch.randn(1000, 96).bfloat16()
    packed = ops.linear_pack(weight, dtype=torch.bfloat16)
    assert torch.equal(ops.packed_rows(packed, torch.arange(1000), 1000, 96, torch.bfloat16), weight)
