"""What chains of calls owe their callers."""

from __future__ import annotations

from collections.abc import Iterator

from tests.contracts.operands import Call
from tests.test_chain import random_calls

ON_XPU = True
SCHEMAS = {
    "chain": "chain(Tensor[] tensors, str calls) -> Tensor[]",
}


def samples_chain() -> Iterator[Call]:
    for seed in range(6):
        calls = random_calls(seed)
        yield calls.arguments(range(len(calls.lines))), {}
