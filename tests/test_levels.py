"""The same random cases on every ISA level, each in a process of its own, with proof that its kernels ran.

XOPT_MAX_ISA caps the child; the call counters of the registry tell which records it used. Every record of every level
that this machine has must have been used in the end: one that never was is untested, and a failure.
"""

from __future__ import annotations

import functools
import json
import pathlib
import subprocess
import tempfile
from typing import Any

import pytest

from tests import fresh_process
from tests.families import TRACE, all_families
from tests.test_sanitizer import sanitizer_is_loaded
from xopt import _C

LEVELS = list(_C.isa_levels())
PRESENT = LEVELS[: LEVELS.index(_C.detected_isa()) + 1]
CASES_PER_FAMILY = 200
FEW_CASES_PER_FAMILY = 40  # of the highest level, at which each family's own tests run hundreds, and under sanitizers
FUZZ_CASES_PER_FAMILY = 10_000


def run_python(level: str, *arguments: str, trace: str | None = None) -> subprocess.CompletedProcess[str]:
    return fresh_process.run(*arguments, XOPT_MAX_ISA=level, **({TRACE: trace} if trace else {}))


@functools.cache
def results_of(level: str, count: int, seed: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("r") as trace:
        done = run_python(level, "-m", "tests", "--json", "--count", str(count), "--seed", str(seed), trace=trace.name)
        case = trace.read()
    lines = done.stdout.splitlines()
    assert lines, (
        f"the process of level {level} ended with {done.returncode} in the case '{case}',"
        f" repeat with: XOPT_MAX_ISA={level} python -m tests '{case}'\n{done.stderr[-4000:]}"
    )
    return dict(json.loads(lines[-1]))


def skip_missing(level: str) -> None:
    if level not in PRESENT:
        pytest.skip(f"NOT RUN: this machine has no {level}; its kernels are unproven here")


def best_records(level: str) -> set[str]:
    """The record of each kernel and dtype that `level` has to choose: the highest up to it."""
    best: dict[tuple[str, str], str] = {}
    for record in sorted(_C.kernels(), key=lambda record: LEVELS.index(record["isa"])):
        if LEVELS.index(record["isa"]) <= LEVELS.index(level):
            best[record["name"], record["dtype"]] = record["isa"]
    return {f"{name} {dtype} {isa}" for (name, dtype), isa in best.items()}


def default_count(level: str) -> int:
    return FEW_CASES_PER_FAMILY if level == PRESENT[-1] or sanitizer_is_loaded() else CASES_PER_FAMILY


def check_level(level: str, count: int, seed: int) -> None:
    results = results_of(level, count, seed)
    assert results["level"] == level
    assert not results["failures"], "\n\n".join(results["failures"])
    assert results["counts"] == {family.name: count for family in all_families()}
    used = {record for record, calls in results["calls"].items() if calls > 0}
    assert used <= best_records(level), "a kernel of another level ran"
    for dtype in ("f32", "bf16", "f16", "s8s8", "u8s8"):
        records = [record for record in used if record.startswith(f"gemm {dtype} ")]
        assert len(records) == 1, f"gemm {dtype} at level {level}: {records}"


@pytest.mark.sanitize
@pytest.mark.parametrize("level", LEVELS)
def test_level(level: str) -> None:
    skip_missing(level)
    check_level(level, default_count(level), seed=100 + LEVELS.index(level))


@pytest.mark.fuzz
@pytest.mark.parametrize("level", LEVELS)
def test_level_fuzz(level: str, request: pytest.FixtureRequest) -> None:
    skip_missing(level)
    check_level(level, FUZZ_CASES_PER_FAMILY, seed=10_000 + request.config.getoption("--fuzz-seed"))


@pytest.mark.sanitize
def test_no_record_is_untested() -> None:
    used: set[str] = set()
    for level in PRESENT:
        results = results_of(level, default_count(level), 100 + LEVELS.index(level))
        used |= {record for record, calls in results["calls"].items() if calls > 0}
    expected = {f"{r['name']} {r['dtype']} {r['isa']}" for r in _C.kernels() if r["isa"] in PRESENT}
    assert expected, "the registry is empty"
    untested = sorted(expected - used - benchmark_probes())
    assert not untested, f"never run by a random case on any level: {untested}; give them a family of cases"


def benchmark_probes() -> set[str]:
    """Records that measure the machine for the bench and compute nothing that could be wrong."""
    return {f"{r['name']} {r['dtype']} {r['isa']}" for r in _C.kernels() if r["name"].startswith("probe")}


def test_packed_weights_are_the_same_bytes_on_every_level() -> None:
    """So a weight packed on one machine is read on another."""
    program = (
        "import hashlib, torch, xopt\n"
        "g = torch.Generator().manual_seed(1)\n"
        "digest = hashlib.sha256()\n"
        "for n, k in ((1, 1), (33, 65), (64, 64), (100, 7), (17, 129)):\n"
        "    w = torch.randn(n, k, generator=g)\n"
        "    for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "        digest.update(torch.ops.xopt.linear_pack(w, dtype=dtype).numpy().tobytes())\n"
        "        digest.update(torch.ops.xopt.linear_pack_gated(w, -w, dtype=dtype).numpy().tobytes())\n"
        "    s8 = (w * 50).clamp(-128, 127).to(torch.int8)\n"
        "    scale = torch.rand(n, generator=g)\n"
        "    digest.update(torch.ops.xopt.linear_pack_int8(s8, scale).numpy().tobytes())\n"
        "    digest.update(torch.ops.xopt.conv_pack_int8(s8[..., None], scale).numpy().tobytes())\n"
        "print(digest.hexdigest())\n"
    )
    digests = {}
    for level in PRESENT:
        done = run_python(level, "-c", program)
        assert done.returncode == 0, done.stderr[-4000:]
        digests[level] = done.stdout.split()[-1]
    assert len(set(digests.values())) == 1, digests


def test_a_failing_case_prints_the_line_that_repeats_it(tmp_path: pathlib.Path) -> None:
    """With a reference broken on purpose, the printed command fails again, and alone; unbroken, it passes."""
    breakage = tmp_path / "sitecustomize.py"
    breakage.write_text(
        "import torch\n"
        "from tests import reference\n"
        "right = reference.matmul\n"
        "def wrong(a, w, flushes):\n"
        "    estimate = right(a, w, flushes)\n"
        "    return reference.Estimate(estimate.value + 1, estimate.error, estimate.nan_allowed, estimate.unchecked)\n"
        "reference.matmul = wrong\n"
    )
    program = f"exec(open({str(breakage)!r}).read())\nimport sys\nfrom tests.__main__ import main\nsys.exit(main({{}}))"
    found = run_python(LEVELS[0], "-c", program.format(["linear", "--count", "5"]))
    assert found.returncode == 1
    line = next(line for line in found.stdout.splitlines() if "--case" in line).split("--case ")[1].strip("'")
    assert run_python(LEVELS[0], "-c", program.format([line])).returncode == 1
    repeated = run_python(LEVELS[0], "-m", "pytest", "-q", "tests/test_linear.py", "--case", line)
    assert repeated.returncode == 0, repeated.stdout[-2000:]
    assert "1 passed" in repeated.stdout
