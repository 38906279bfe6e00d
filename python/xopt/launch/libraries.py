"""Finding shared libraries without loading them, and without a compiler or ldconfig: where the loader would look, and
where pip, conda and oneAPI put theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_SYSTEM = ("usr/local/lib", "usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib64", "lib64", "usr/lib", "lib")
_ONEAPI = ("opt/intel/oneapi/compiler/latest/lib", "opt/intel/oneapi/compiler/latest/linux/compiler/lib/intel64_lin")


def directories(
    environment: Mapping[str, str], root: Path = Path("/"), prefix: Path = Path(sys.prefix)
) -> tuple[Path, ...]:
    """Where libraries are looked for, best first, each once."""
    found: dict[Path, None] = {}
    for directory in _candidates(environment, root, prefix):
        if directory.is_dir():
            found.setdefault(directory.resolve())
    return tuple(found)


def _candidates(environment: Mapping[str, str], root: Path, prefix: Path) -> Iterator[Path]:
    yield from (Path(part) for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part)
    yield prefix / "lib"
    if "CONDA_PREFIX" in environment:
        yield Path(environment["CONDA_PREFIX"], "lib")
    for listing in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        lines = listing.read_text(errors="replace").splitlines()
        yield from (root / line.strip().lstrip("/") for line in lines if line.strip().startswith("/"))
    yield from (root / directory for directory in (*_SYSTEM, *_ONEAPI))


def find(names: Iterable[str], places: Iterable[Path]) -> Path | None:
    """The first library of one of these names ("libtcmalloc.so"), the first name first; also with a version behind."""
    places = tuple(places)
    for name in names:
        for place in places:
            versions = sorted(path for path in place.glob(f"{name}*") if _is_version_of(path.name, name))
            if versions:
                return versions[0]
    return None


def _is_version_of(file: str, name: str) -> bool:
    return all(part.isdigit() for part in file.removeprefix(name).split(".") if part)
