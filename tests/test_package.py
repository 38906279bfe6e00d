"""The package as a thing to install and import: what its libraries need, and what importing it costs."""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib
import re
import shutil
import subprocess

import pytest

import xopt
from tests import fresh_process
from tests.test_sanitizer import sanitizer_is_loaded

PACKAGE = pathlib.Path(xopt._C.__file__).parent
LIBRARIES = ("libxopt_core.so", "libxopt_ops.so", pathlib.Path(xopt._C.__file__).name)
OPENMP = re.compile(r"lib(gomp|iomp|omp)")


def tool_output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"NOT RUN: there is no {command[0]}")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def needed_by(library: str) -> tuple[str, ...]:
    return tuple(
        re.findall(r"\(NEEDED\).*\[(.+)\]", tool_output("readelf", "--dynamic", "--wide", str(PACKAGE / library)))
    )


def symbols_of(library: str, kind: str) -> list[str]:
    lines = tool_output("nm", "--dynamic", "--demangle", kind, str(PACKAGE / library)).splitlines()
    return [
        re.sub(r"^[0-9a-f]*\s+\w ", "", line.strip()) if kind == "--defined-only" else line.split(maxsplit=1)[1]
        for line in lines
    ]


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_library_needs_an_openmp_runtime_of_its_own(library: str) -> None:
    needed = needed_by(library)
    assert needed, "a library without any needs: readelf was misread"
    assert not [name for name in needed if OPENMP.match(name)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_exceptions_can_cross_into_torch(library: str) -> None:
    """A compiler set to link libstdc++ statically gives libraries with a second one, whose streams are not torch's."""
    assert "libstdc++.so.6" in needed_by(library)


def test_the_package_bundles_no_openmp_runtime() -> None:
    assert not [path for path in PACKAGE.parent.glob("*xopt*/**/*") if OPENMP.match(path.name)]
    for library in LIBRARIES:
        defined = symbols_of(library, "--defined-only")
        assert not [symbol for symbol in defined if symbol.startswith(("omp_", "GOMP_", "__kmpc_"))]


def test_openmp_comes_from_torch() -> None:
    """The calls are there, and undefined."""
    undefined = symbols_of("libxopt_core.so", "--undefined-only")
    assert [symbol for symbol in undefined if symbol.startswith("GOMP_parallel")]


def test_core_and_python_module_do_not_know_torch() -> None:
    for library in LIBRARIES:
        if library != "libxopt_ops.so":
            assert not [name for name in needed_by(library) if name.startswith(("libtorch", "libc10"))]


def test_the_op_library_uses_torchs_c_interface_only() -> None:
    """The stable ABI: the same build serves every torch release from 2.11 on."""
    undefined = symbols_of("libxopt_ops.so", "--undefined-only")
    assert [symbol for symbol in undefined if symbol.startswith(("aoti_torch_", "torch_"))], "nm was misread"
    strangers = [symbol for symbol in undefined if re.search(r"\b(at|c10|caffe2|torch)::", symbol)]
    assert not strangers, "\n".join(strangers)


@pytest.mark.parametrize("first", ["import torch, xopt", "import xopt, torch"])
def test_import_before_or_after_torch(first: str) -> None:
    program = f"""
        {first}
        packed = torch.ops.xopt.linear_pack(torch.ones(4, 8), dtype=torch.float32)
        result = torch.ops.xopt.linear(torch.ones(2, 8), packed, 4)
        print(len(xopt.capabilities().openmp), result.sum().item())
    """
    assert fresh_process.output_of_cold(program) == "1 64.0"


@pytest.mark.skipif(sanitizer_is_loaded(), reason="NOT RUN: a sanitizer slows imports")
def test_import_costs_little_beyond_torchs_own() -> None:
    """Timed after torch in the same process; the least of several runs, since any other load only adds to it."""
    program = """
        import time, torch
        start = time.process_time()
        import xopt
        print(time.process_time() - start)
    """
    assert min(float(fresh_process.output_of(program)) for _ in range(5)) < 0.5


@pytest.mark.parametrize("collects", [True, False])
def test_import_leaves_the_collector_as_it_is(collects: bool) -> None:
    program = f"""
        import gc, torch
        {"gc.enable" if collects else "gc.disable"}()
        import xopt
        print(gc.isenabled())
    """
    assert fresh_process.output_of(program).strip() == str(collects)


def test_import_brings_in_nothing_heavy() -> None:
    program = """
        import sys, torch
        before = set(sys.modules)
        import xopt
        print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
    """
    brought = set(fresh_process.output_of(program).split())
    assert not brought & {"rich", "matplotlib", "psutil", "transformers", "diffusers"}


def test_version() -> None:
    try:
        installed = importlib.metadata.version("torch-xopt")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("NOT RUN: xopt is on the path, but not installed as a distribution")
    assert xopt.__version__ == installed


def test_public_names_are_there() -> None:
    assert all(hasattr(xopt, name) for name in xopt.__all__)
