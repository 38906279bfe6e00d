"""Runs clang-tidy over every C++ source, as many at once as cores; over kernels at each ISA level whose vocabulary is a
file of its own: `scalar`, `avx2` and the highest, which has all that `avx512` and those above it add.

Reads build/lint/compile_commands.json. A source and level that passed before are not looked at again until a file below
csrc, the checks or the compile command change: what passed is kept in build/lint/passed.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINT = ROOT / "build" / "lint"
AVX512 = 2  # as XOPT_LEVEL
GCC_ONLY = {"-fno-trapping-math", "-fno-split-loops", "-fno-split-paths", "-fno-unswitch-loops"}


def gcc_include_dir() -> str:
    """Where omp.h lies, which clang-tidy does not bring along."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    printed = subprocess.run([*compiler, "-print-file-name=include"], check=True, capture_output=True, text=True)
    return printed.stdout.strip()


def clang_arguments(command: str, omp_dir: Path) -> list[str]:
    """GCC's command line as clang understands it."""
    arguments = shlex.split(command)[1:]
    output = arguments.index("-o")
    del arguments[output : output + 2]
    arguments = [argument for argument in arguments if argument not in GCC_ONLY | {"-c"}]
    return [*arguments, f"-isystem{omp_dir}", "-Wno-unknown-warning-option"]


def at_telling_levels(entries: list[dict[str, str]]) -> list[dict[str, str]]:
    """Without the levels from avx512 on that a higher one of the same source covers."""
    highest: dict[str, int] = {}
    for entry in entries:
        highest[entry["file"]] = max(highest.get(entry["file"], 0), level(entry))
    return [entry for entry in entries if level(entry) < AVX512 or level(entry) == highest[entry["file"]]]


def level(entry: dict[str, str]) -> int:
    found = re.search(r"-DXOPT_LEVEL=(\d)", entry["command"])
    return int(found[1]) if found else 0


def fingerprint(text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for path in sorted([*ROOT.glob("csrc/**/*.h"), ROOT / ".clang-tidy"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def tidy(entry: dict[str, str], omp_dir: Path) -> str:
    """Empty if all is well, else what clang-tidy says."""
    arguments = clang_arguments(entry["command"], omp_dir)
    stamp = LINT / "passed" / fingerprint(" ".join(arguments) + Path(entry["file"]).read_text())
    if stamp.exists():
        return ""
    result = subprocess.run(
        ["clang-tidy", "--quiet", entry["file"], "--", *arguments],
        cwd=entry["directory"],
        capture_output=True,
        text=True,
    )
    if result.returncode == 0:
        stamp.touch()
        return ""
    return result.stdout + result.stderr


def main() -> int:
    # A folder with omp.h and nothing else: the rest of GCC's own headers would hide clang's intrinsics.
    omp_dir = LINT / "include"
    omp_dir.mkdir(parents=True, exist_ok=True)
    (omp_dir / "omp.h").write_bytes((Path(gcc_include_dir()) / "omp.h").read_bytes())
    (LINT / "passed").mkdir(exist_ok=True)

    entries = at_telling_levels(json.loads((LINT / "compile_commands.json").read_text()))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lambda entry: tidy(entry, omp_dir), entries))
    failed = [report for report in reports if report]
    print("\n".join(failed) or f"clang-tidy: {len(entries)} compilations are clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
