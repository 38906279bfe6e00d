"""Finds the SYCL runtime's libraries and loads xopt's module on them, when it is first asked for.

The runtime's packages put their libraries where the dynamic loader does not look, so libsycl is loaded by its path
first; where torch has brought one of its own, that one is used.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path
from types import ModuleType

_log = logging.getLogger("xopt")

RUNTIME = "libsycl.so.9"
HOW_TO_GET_IT = "get it by `make xpu`, or by pip with --config-settings=cmake.define.XOPT_SYCL=ON and torch-xopt[xpu]"
_SYSTEM_DRIVERS = Path("/etc/OpenCL/vendors")


def built() -> bool:
    return importlib.util.find_spec("xopt._sycl") is not None


@functools.cache
def native() -> ModuleType:
    """The module; an ImportError says what is missing and how to get it."""
    if not built():
        raise ImportError(f"xopt.sycl: this build of xopt has no SYCL part; {HOW_TO_GET_IT}")
    try:
        _load_runtime()
        return importlib.import_module("xopt._sycl")
    except (ImportError, OSError) as error:
        raise ImportError(f"xopt.sycl: the SYCL runtime cannot be loaded ({error}); {HOW_TO_GET_IT}") from error


def _load_runtime() -> None:
    try:
        ctypes.CDLL(RUNTIME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)  # torch's, if it has brought one
    except OSError:
        path = _file_of("intel-sycl-rt", RUNTIME)
        ctypes.CDLL(RUNTIME if path is None else str(path))


@functools.cache
def opencl_driver() -> str:
    """The path of the CPU's OpenCL driver where the system does not know of it; else empty.

    The package that brings the driver registers it under the path of the machine that it was made on.
    """
    path = _file_of("intel-opencl-rt", "libintelocl.so")
    if path is None or any(_names_a_file(entry) for entry in _SYSTEM_DRIVERS.glob("*intel*cpu*.icd")):
        return ""
    _log.info("sycl: the OpenCL driver for CPUs is taken from %s", path)
    return str(path)


def _names_a_file(entry: Path) -> bool:
    try:
        return Path(entry.read_text().strip()).exists()
    except OSError:
        return False


def _file_of(package: str, name: str) -> Path | None:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())).resolve() for file in files if file.name == name)
    return next((path for path in paths if path.exists()), None)
