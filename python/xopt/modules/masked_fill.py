"""Masks whose number a dtype cannot hold, in forwards that run as they are.

DeBERTa adds a bias, which stays fp32, to its queries, and fills what it masks with the least number of the queries'
dtype. Its scores are a product, bf16 as autocast has it, and torch raises an error for a number beyond that. The source
model, all of it in bf16, fills in the least number of bf16: so does this.
"""

from __future__ import annotations

from typing import Any

import torch

from xopt.graph.symbol import within
from xopt.modules.substitute import are_plain, in_place_of


@in_place_of(torch.masked_fill, torch.Tensor.masked_fill, switch=None)
def _masked_fill_of_torch(input: Any, mask: Any, value: Any, *rest: Any, **named: Any) -> Any:
    if rest or named or not are_plain(input, mask) or input.dtype not in (torch.bfloat16, torch.float16):
        return NotImplemented
    held = within(input.dtype, value)
    return NotImplemented if held is value else input.masked_fill(mask, held)
