"""Canaries of `make sanitize`: a kernel led past the end of its buffer must be reported, or the sanitizer is blind.

The read out of bounds is made by the kernels of this very build, through a tensor that claims more memory than was
allocated; so it proves that they are instrumented, and not only that some runtime is loaded. Outside a sanitizer these
tests are skipped, since the read would go unnoticed.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

LYING_TENSOR = """
import ctypes, sys, torch, xopt
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
n, k = 8, 64
claimed = 4 * k * 4
block = libc.malloc(ctypes.c_size_t(claimed - int(sys.argv[1])))
x = torch.frombuffer((ctypes.c_char * claimed).from_address(block), dtype=torch.float32).view(4, k)
ctypes.memset(block, 0, claimed - int(sys.argv[1]))
packed = torch.ops.xopt.linear_pack(torch.randn(n, k), dtype=torch.float32)
torch.ops.xopt.linear(x, packed, n)
print("went through")
"""


def sanitizer_is_loaded() -> bool:
    return hasattr(ctypes.CDLL(None), "__asan_init")


def run_lying_tensor(missing_bytes: int) -> subprocess.CompletedProcess[str]:
    # A report has to end the process, whatever the tests around run with.
    options = os.environ.get("ASAN_OPTIONS", "")
    environment = {**os.environ, "ASAN_OPTIONS": ":".join(filter(None, [options, "halt_on_error=1", "exitcode=99"]))}
    command = [sys.executable, "-c", LYING_TENSOR, str(missing_bytes)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def need_sanitizer() -> None:
    if not sanitizer_is_loaded():
        pytest.skip("no AddressSanitizer in this process: run by `make sanitize`")


@pytest.mark.sanitize
def test_sanitizer_sees_the_kernels() -> None:
    need_sanitizer()
    caught = run_lying_tensor(missing_bytes=4)
    assert caught.returncode != 0, "a kernel read past the end of its input and nothing was reported"
    # A vector load that begins inside the block and ends outside is of no kind that AddressSanitizer has a name for.
    kinds = ("AddressSanitizer: heap-buffer-overflow", "AddressSanitizer: unknown-crash")
    assert any(kind in caught.stderr for kind in kinds), caught.stderr[-4000:]
    assert "xopt" in caught.stderr, "the report does not come from xopt's own code"


@pytest.mark.sanitize
def test_canary_passes_where_nothing_is_wrong() -> None:
    """The canary dies of the missing bytes, not of how it is made."""
    need_sanitizer()
    fine = run_lying_tensor(missing_bytes=0)
    assert fine.returncode == 0, fine.stderr[-4000:]
    assert "went through" in fine.stdout
