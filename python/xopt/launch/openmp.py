"""The OpenMP runtime of the instances: which one torch uses, and the variables that bind and limit its threads.

The runtime is found by looking at torch's files: loading torch would take longer than starting the instances.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xopt.launch import libraries
from xopt.launch.errors import LaunchError

CHOICES = ("default", "intel")

_INTEL = ("libiomp5.so",)
# Intel's runtime lets threads spin for 200 ms after a region, on cores that other threads of the instance could use.
_BLOCK_MILLISECONDS = 1


@dataclass(frozen=True)
class OpenMP:
    kind: str
    """ "gnu", "intel" or "unknown"."""
    library: Path | None
    """To be loaded ahead of torch's own."""
    reason: str
    environment: Mapping[str, str] = field(default_factory=dict)


def torch_directory() -> Path | None:
    """Where torch is installed, found without loading it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def choose(asked: str, environment: Mapping[str, str], places: Sequence[Path], torch: Path | None) -> OpenMP:
    preloaded = environment.get("LD_PRELOAD", "")
    if "libiomp5" in preloaded:
        return OpenMP("intel", None, "LD_PRELOAD already has Intel's OpenMP runtime, which is kept.")
    if asked == "intel":
        own = [] if torch is None else [torch / "lib"]
        library = libraries.find(_INTEL, [*own, *places])
        if library is None:
            looked = ", ".join(map(str, places))
            raise LaunchError(
                f"--omp-runtime intel: there is no libiomp5.so in {looked}. "
                "To install it: pip install intel-openmp, or conda install intel-openmp"
            )
        return OpenMP("intel", library, f"Intel's OpenMP runtime, as asked for: {library}.")
    return _of_torch(torch)


def _of_torch(torch: Path | None) -> OpenMP:
    if torch is None:
        return OpenMP("unknown", None, "torch is not installed here, so that its OpenMP runtime is not known.")
    for kind, name, words in (("gnu", "libgomp", "GNU's"), ("intel", "libiomp5", "Intel's")):
        for directory in (torch / "lib", torch.parent / "torch.libs"):
            if any(directory.glob(f"{name}*.so*")):
                return OpenMP(kind, None, f"torch brings {words} OpenMP runtime along ({name}).")
    return OpenMP("unknown", None, "torch brings no OpenMP runtime along, so that standard variables are used.")


def variables(runtime: OpenMP, cpus: Sequence[int], threads: int, fixed: bool, crowded: bool) -> dict[str, str]:
    """`fixed`: bind each thread to one of the CPUs; `crowded`: the threads have less time than CPUs, so that none may
    spend it waiting actively."""
    found = {"OMP_NUM_THREADS": str(threads)}
    if crowded:
        found["OMP_WAIT_POLICY"] = "PASSIVE"
    if runtime.kind == "intel":
        found["KMP_BLOCKTIME"] = "0" if crowded else str(_BLOCK_MILLISECONDS)
    # With one CPU, the process's affinity has said all.
    if not fixed or len(cpus) < 2:
        return found
    listed = ",".join(map(str, cpus))
    if runtime.kind == "gnu":
        found["GOMP_CPU_AFFINITY"] = " ".join(map(str, cpus))
    elif runtime.kind == "intel":
        found["KMP_AFFINITY"] = f"granularity=fine,proclist=[{listed}],explicit"
    else:
        found["OMP_PLACES"] = ",".join(f"{{{cpu}}}" for cpu in cpus)
        found["OMP_PROC_BIND"] = "close"
    return found
