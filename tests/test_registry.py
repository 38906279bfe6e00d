"""The registry of kernels: what is in it, and which kernel each level takes, pinned."""

from __future__ import annotations

import functools
import json

import pytest

import xopt
from tests import fresh_process
from xopt import _C

LEVELS = _C.isa_levels()

# For each level from the lowest on: the level of the GEMM it takes, by dtype. Where a dtype gains nothing from a level,
# the one below it serves. bf16 has no use for VNNI, nor f16 and f32 for anything above AVX-512.
GEMM = {
    "f32": ("scalar", "avx2", "avx512", "avx512", "avx512", "avx512"),
    "bf16": ("scalar", "avx2", "avx512", "avx512", "avx512_bf16", "amx"),
    "f16": ("scalar", "avx2", "avx512", "avx512", "avx512", "avx512"),
    "s8s8": ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_vnni", "amx"),
    "u8s8": ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_vnni", "amx"),
}


@functools.cache
def kernels_at(level: str) -> tuple[dict[str, object], ...]:
    program = """
        import dataclasses, json, xopt
        print(json.dumps([dataclasses.asdict(kernel) for kernel in xopt.kernels()]))
    """
    return tuple(json.loads(fresh_process.output_of(program, XOPT_MAX_ISA=level)))


def skip_missing(level: str) -> None:
    if LEVELS.index(level) > LEVELS.index(_C.detected_isa()):
        pytest.skip(f"NOT RUN: this machine has no {level}; what it chooses is unproven here")


@pytest.mark.parametrize("level", LEVELS)
def test_gemm_of_each_level(level: str) -> None:
    skip_missing(level)
    chosen = {
        kernel["dtype"]: kernel["isa"] for kernel in kernels_at(level) if kernel["name"] == "gemm" and kernel["chosen"]
    }
    assert chosen == {dtype: isa[LEVELS.index(level)] for dtype, isa in GEMM.items()}


@pytest.mark.parametrize("level", LEVELS)
def test_each_kernel_takes_its_highest_level_up_to_the_cap(level: str) -> None:
    skip_missing(level)
    best: dict[tuple[object, object], str] = {}
    for kernel in kernels_at(level):
        isa = str(kernel["isa"])
        if LEVELS.index(isa) <= LEVELS.index(level):
            key = (kernel["name"], kernel["dtype"])
            best[key] = max(best.get(key, isa), isa, key=LEVELS.index)
    chosen = {(k["name"], k["dtype"]): k["isa"] for k in kernels_at(level) if k["chosen"]}
    assert chosen == best


def test_every_level_of_the_gemm_is_built() -> None:
    """Also those that this machine cannot run."""
    built = {
        dtype: {kernel.isa for kernel in xopt.kernels() if (kernel.name, kernel.dtype) == ("gemm", dtype)}
        for dtype in GEMM
    }
    assert built == {dtype: set(isa) for dtype, isa in GEMM.items()}


def test_every_kernel_runs_on_any_cpu() -> None:
    everywhere = {(kernel.name, kernel.dtype) for kernel in xopt.kernels() if kernel.isa == "scalar"}
    assert everywhere == {(kernel.name, kernel.dtype) for kernel in xopt.kernels()}


def test_no_kernel_is_registered_twice() -> None:
    keys = [(kernel.name, kernel.dtype, kernel.isa) for kernel in xopt.kernels()]
    assert len(keys) == len(set(keys))
    assert keys == sorted(keys, key=lambda key: (key[0], key[1], LEVELS.index(key[2])))


def test_a_missing_kernel_is_named_with_what_there_is() -> None:
    with pytest.raises(
        RuntimeError, match=r"no kernel 'gemm' of dtype 'f64' at level .*'gemm' for bf16 \(.*scalar.*f32"
    ):
        _C.find_kernel("gemm", "f64")
    with pytest.raises(RuntimeError, match=r"no kernel 'fft' of dtype 'f32' at level .*the kernels .*\bgemm\b"):
        _C.find_kernel("fft", "f32")


def test_calls_are_counted_where_they_ran() -> None:
    program = """
        import torch, xopt
        packed = torch.ops.xopt.linear_pack(torch.randn(8, 8), dtype=torch.float32)
        before = {(k.name, k.dtype, k.isa): k.calls for k in xopt.kernels()}
        torch.ops.xopt.linear(torch.randn(3, 8), packed, 8)
        after = {(k.name, k.dtype, k.isa): k.calls for k in xopt.kernels()}
        print(*(f"{key[1]} {key[2]}" for key in after if key[0] == "gemm" and after[key] > before[key]))
    """
    assert fresh_process.output_of(program, XOPT_MAX_ISA="scalar") == "f32 scalar"
