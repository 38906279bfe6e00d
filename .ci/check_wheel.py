"""Checks a built wheel: tagged manylinux, holding our four libraries and no other, with no OpenMP runtime linked."""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OWN_LIBRARIES = re.compile(r"xopt/(libxopt_(core|ops|pool)\.so|_C\.[\w-]+\.so)")
ALLOWED_DEPENDENCIES = re.compile(r"libxopt_core\.so|libtorch_cpu\.so|lib(stdc\+\+|gcc_s|c|m)\.so\.\d+|ld-linux.*")


def dependencies(library: Path) -> list[str]:
    printed = subprocess.run(
        ["patchelf", "--print-needed", str(library)], check=True, capture_output=True, text=True
    ).stdout
    return printed.split()


def problems(wheel: Path) -> list[str]:
    found = []
    if "manylinux" not in wheel.name:
        found.append(f"{wheel.name} carries no manylinux tag")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).name]
        if len(libraries) != 4:
            found.append(f"expected four libraries, found {libraries}")
        found += [f"{name} is bundled" for name in libraries if not OWN_LIBRARIES.fullmatch(name)]
        for name in libraries:
            for needed in dependencies(Path(archive.extract(name, folder))):
                if not ALLOWED_DEPENDENCIES.fullmatch(needed):
                    found.append(f"{name} links {needed}")
    return found


def main() -> int:
    found = [problem for name in sys.argv[1:] for problem in problems(Path(name))]
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if not found:
        print("wheel is fine:", *sys.argv[1:])
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
