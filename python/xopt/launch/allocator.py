"""The memory allocator of the instances: which one, by what library, and what to say where it is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xopt.launch import libraries
from xopt.launch.errors import LaunchError

CHOICES = ("auto", "default", "tcmalloc", "jemalloc", "pool")

_LIBRARIES = {
    "tcmalloc": ("libtcmalloc.so", "libtcmalloc_minimal.so"),
    "jemalloc": ("libjemalloc.so",),
    "pool": ("libxopt_pool.so",),
}
_INSTALL = {
    "tcmalloc": "Debian, Ubuntu: apt install libtcmalloc-minimal4; Fedora: dnf install gperftools-libs; "
    "conda: conda install -c conda-forge gperftools",
    "jemalloc": "Debian, Ubuntu: apt install libjemalloc2; Fedora: dnf install jemalloc; "
    "conda: conda install -c conda-forge jemalloc",
    "pool": "it is a part of xopt that this build was made without",
}
# jemalloc gives memory back after ten seconds unless it is told not to: a model asks for the same again and again.
_ENVIRONMENT = {
    "jemalloc": {
        "MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
        "dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
    }
}


@dataclass(frozen=True)
class Allocator:
    name: str
    """One of CHOICES but "auto"; "user": what LD_PRELOAD has brought already."""
    library: Path | None
    reason: str
    environment: Mapping[str, str] = field(default_factory=dict)


def choose(asked: str, environment: Mapping[str, str], places: Sequence[Path]) -> Allocator:
    """`environment`: the user's own, which wins; `places`: where libraries are looked for."""
    preloaded = [Path(part).name for part in environment.get("LD_PRELOAD", "").replace(":", " ").split()]
    own = [name for name in preloaded if "malloc" in name or name in _LIBRARIES["pool"]]
    if own:
        ignored = "" if asked in ("auto", "default") else f"; --memory-allocator {asked} is ignored"
        return Allocator("user", None, f"LD_PRELOAD already has {own[0]}, which is kept{ignored}.")
    if asked == "default":
        return Allocator("default", None, "The system's malloc (--memory-allocator default).")
    if asked == "auto":
        return _best(places)
    library = libraries.find(_LIBRARIES[asked], places)
    if library is None:
        looked = ", ".join(map(str, places))
        raise LaunchError(
            f"--memory-allocator {asked}: there is no {' or '.join(_LIBRARIES[asked])} in {looked}. "
            f"To install it: {_INSTALL[asked]}"
        )
    return Allocator(asked, library, f"{asked}, as asked for: {library}.", _ENVIRONMENT.get(asked, {}))


def available(places: Sequence[Path]) -> list[str]:
    """The allocators that could be asked for by name."""
    return ["default", *(name for name, files in _LIBRARIES.items() if libraries.find(files, places) is not None)]


def _best(places: Sequence[Path]) -> Allocator:
    for name in ("tcmalloc", "jemalloc"):
        library = libraries.find(_LIBRARIES[name], places)
        if library is not None:
            reason = f"auto took {name}, the first of tcmalloc and jemalloc that is installed: {library}."
            return Allocator(name, library, reason, _ENVIRONMENT.get(name, {}))
    reason = "auto kept the system's malloc: neither tcmalloc nor jemalloc is installed."
    return Allocator("default", None, reason)
