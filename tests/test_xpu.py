"""Tensors of device xpu, torch's name for Intel GPUs. No build of torch with XPU is to be had here: what can be run
without one is, by a stand-in (tests/xpu_stand_in), in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests import fresh_process
from tests.contracts import registered_ops, runs_on_xpu
from tests.xpu_stand_in import FOLDER
from xopt import sycl

pytestmark = pytest.mark.long
needs_sycl = pytest.mark.skipif(
    not sycl.available(), reason="NOT RUN: operators on tensors of device xpu, since the SYCL runtime is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER, str(tmp_path_factory.mktemp("stand_in")))
        yield


@needs_sycl
def test_on_the_stand_in_for_torch_with_xpu() -> None:
    """Each operator against float64, whole models against the CPU path, chains without waits, and what is refused."""
    done = fresh_process.run("-m", "pytest", "-q", "--no-header", "tests/xpu_stand_in/checks.py")
    print(done.stdout[-20000:], done.stderr[-4000:], file=sys.stderr)
    assert done.returncode == 0


@pytest.mark.parametrize("op", registered_ops())
def test_operators_are_registered_for_xpu_beside_the_cpu(op: str) -> None:
    """Those without a kernel there by what refuses the call in one line."""
    (kernel,) = (line for line in torch._C._dispatch_dump(f"xopt::{op}").splitlines() if line.startswith("XPU:"))
    assert ("csrc/ops/" in kernel) != ("/ops/xpu.py" in kernel)
    assert ("csrc/ops/" in kernel) == runs_on_xpu(op)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fakes of any GPU then begin with a tensor on it")
def test_fakes_answer_on_device_xpu() -> None:
    """By which torch.compile and torch.export know what an operator returns."""
    mode = FakeTensorMode()
    x, packed = (
        FakeTensor(mode, torch.empty(size, dtype=dtype, device="meta"), torch.device("xpu:0"))
        for size, dtype in (((3, 5, 32), torch.float32), ((64,), torch.uint8))
    )
    with mode, torch.no_grad():
        result = torch.ops.xopt.linear(x, packed, 16)
    assert result.device == torch.device("xpu:0")
    assert result.shape == (3, 5, 16)


WHAT_AN_OPERATOR_SAYS = """
    import ctypes, sys, torch, xopt
    from tests import xpu_stand_in
    from xopt.sycl import loading

    def said():
        try:
            return str(tuple(torch.ops.xopt.softmax(x).shape))
        except RuntimeError as error:
            return str(error)

"""


@needs_sycl
def test_torch_that_gives_no_queue_is_named() -> None:
    program = """
    xpu_stand_in.start("STAND_IN_WITHOUT_QUEUES")
    x = xpu_stand_in.to_xpu(torch.ones(2, 3))
    print(said())
    """
    expected = (
        "xopt::softmax: input: got a tensor on xpu:0, where nothing can run: this build of torch gives no SYCL queues"
    )
    assert fresh_process.output_of(WHAT_AN_OPERATOR_SAYS + program).startswith(expected)


@needs_sycl
def test_without_the_part_operators_on_xpu_say_how_to_get_it() -> None:
    program = """
    xpu_stand_in.start()
    x = xpu_stand_in.to_xpu(torch.ones(2, 3))
    loading.native.cache_clear()
    built, loading.built = loading.built, lambda: False
    print(said())
    loading.built = built
    print(said())
    """
    missing, there = fresh_process.output_of(WHAT_AN_OPERATOR_SAYS + program).splitlines()
    assert "where nothing can run: xopt.sycl: this build of xopt has no SYCL part; get it by `make xpu`" in missing
    assert there == "(2, 3)"


@needs_sycl
def test_another_sycl_runtime_in_the_process_is_named(tmp_path: Path) -> None:
    """As torch would bring one of another major version: an empty library that is called so."""
    other = tmp_path / "libsycl.so.8"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", str(other)], check=True)
    program = f"""
    ctypes.CDLL({str(other)!r})
    xpu_stand_in.start()
    x = xpu_stand_in.to_xpu(torch.ones(2, 3))
    print(said())
    """
    line = fresh_process.output_of(WHAT_AN_OPERATOR_SAYS + program)
    assert "torch and xopt use different SYCL runtimes" in line
    assert str(other) in line
    assert "xopt needs libsycl.so.9" in line
