"""The kernels on SYCL devices: the families of the operators' own tests, run on the CPU's SYCL device.

Where the CPU has AMX, products run on it in the CPU's best tile and in that of XMX; elsewhere the same loops run on
vectors, and what that leaves unproven is said at the end of the run.
"""

from __future__ import annotations

import pytest
import torch

from tests.families import find_family
from xopt import sycl

if not sycl.available():
    pytest.skip("NOT RUN: kernels on SYCL devices, whose runtime is not installed (make xpu)", allow_module_level=True)

XMX_TILE = (8, 16, 16)
CASES = 40
MOST_DEPTH = 512  # of attention, whose blocks lie in local memory


def run_family(name: str, count: int = CASES) -> None:
    family = find_family(name)
    cases = (case for case in family.cases(seed=77, count=count) if getattr(case, "depth", 0) <= MOST_DEPTH)
    before = sum(sycl.calls().values())
    assert family.run_all(cases) > count // 2
    assert sum(sycl.calls().values()) - before > count // 2


@pytest.mark.parametrize(
    "name", ["linear", "linear_gated", "linear_norm", "qlinear", "norm", "rotary", "attention", "conv"]
)
def test_operators_against_float64(name: str) -> None:
    with sycl.device("cpu"):
        run_family(name)


def test_depths_beyond_local_memory_are_named() -> None:
    query = torch.zeros(1, 1, 1, 4096)
    with (
        sycl.device("cpu"),
        pytest.raises(RuntimeError, match=r"query: depths of 4096 and 4096 take \d+ bytes of local"),
    ):
        torch.ops.xopt.attention(query, query, query)
