"""Compiles every device source as an Intel GPU would have it, without a GPU, and looks at what came out.

To SPIR-V by the runtime's own compiler: products must be those of matrix units. From there, where Intel's offline
compiler `ocloc` is on the path or named by OCLOC (Debian: intel-ocloc and libigc2), to machine code for five GPUs:
matrix kernels must contain `dpas`, and nothing may be spilled. Proves code generation only: nothing is run.

    make check-xmx          OCLOC=/path/to/ocloc make check-xmx
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from xopt.sycl import loading

# The tile of each GPU's matrix units, rows x columns x depth of bf16.
TILES = {(8, 16, 16): ("pvc", "bmg", "lnl-m", "ptl-h"), (8, 8, 16): ("dg2",)}
# OpCooperativeMatrixMulAddKHR, and OpJointMatrixMadINTEL and its like of older translators.
MULTIPLY_ADDS = {4459, 6121, 6178}
BUILD = """
import sys
from xopt.sycl import loading
loading.native().devices(loading.opencl_driver())
try:
    loading.native().open(0, "", None, True).build(sys.argv[1], sys.argv[2:])
except RuntimeError as error:
    print(error)
"""


def spirv_of(source: str, options: list[str], folder: Path) -> Path:
    """The runtime writes out what it compiles, also what the device at hand lacks the means for."""
    environment = {**os.environ, "SYCL_DUMP_IMAGES": "1"}
    command = [sys.executable, "-c", BUILD, source, *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    images = sorted(folder.glob("*.spv"))
    if not images:
        raise RuntimeError(f"{source} {' '.join(options)} made no SPIR-V:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return images[-1]


def opcodes(spirv: bytes) -> set[int]:
    words = struct.unpack(f"<{len(spirv) // 4}I", spirv[: len(spirv) // 4 * 4])
    found, at = set(), 5  # after the header
    while at < len(words):
        found.add(words[at] & 0xFFFF)
        at += max(1, words[at] >> 16)
    return found


def machine_code(ocloc: str, spirv: Path, gpu: str, folder: Path) -> tuple[int, int, int]:
    """How many dpas it has, bytes that it spills, registers of a thread."""
    out = folder / gpu
    compiled = subprocess.run(
        [ocloc, "compile", "-spirv_input", "-file", str(spirv), "-device", gpu, "-output", "k", "-out_dir", str(out)],
        capture_output=True,
        text=True,
    )
    binary = next(iter(out.glob("*.bin")), None)
    if compiled.returncode or binary is None:
        raise RuntimeError(f"ocloc failed for {gpu}:\n{compiled.stdout[-2000:]}{compiled.stderr[-2000:]}")
    subprocess.run(
        [ocloc, "disasm", "-file", str(binary), "-dump", str(out / "dump"), "-device", gpu],
        capture_output=True,
        check=True,
    )
    listing = "".join(path.read_text(errors="replace") for path in (out / "dump").glob(".text.__sycl_kernel*.asm"))
    facts = (out / "dump" / ".ze_info").read_text()
    spills = sum(int(size) for size in re.findall(r"spill_size:\s*(\d+)", facts))
    registers = max(int(count) for count in re.findall(r"grf_count:\s*(\d+)", facts))
    return len(re.findall(r"\bdpas", listing)), spills, registers


def problems_of(source: str, options: list[str], gpus: tuple[str, ...], ocloc: str | None) -> list[str]:
    name = f"{source} {' '.join(option.removeprefix('-DXOPT_') for option in options)}"
    matrix = "-DXOPT_MATRIX=1" in options
    problems = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        spirv = spirv_of(source, options, folder)
        found = opcodes(spirv.read_bytes())
        if matrix and not found & MULTIPLY_ADDS:
            problems.append(f"{name}: no product of matrix units in its SPIR-V")
        print(f"{name}: SPIR-V")
        for gpu in gpus if ocloc else ():
            products, spills, registers = machine_code(str(ocloc), spirv, gpu, folder)
            print(f"    {gpu}: {products} dpas, {registers} registers, {spills} bytes spilled", flush=True)
            if matrix and products == 0:
                problems.append(f"{name}: no dpas for {gpu}")
            if spills > 0:
                problems.append(f"{name}: {spills} bytes spilled for {gpu}")
    return problems


def main() -> int:
    ocloc = os.environ.get("OCLOC") or shutil.which("ocloc")
    if ocloc is None:
        print("NOT RUN: machine code for GPUs, since there is no ocloc (OCLOC=...); SPIR-V only")
    problems = [
        problem
        for tile, gpus in TILES.items()
        for source, options in loading.native().gpu_builds(*tile)
        for problem in problems_of(source, options, gpus, ocloc)
    ]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
