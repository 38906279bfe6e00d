"""The layer rule of the house, in Python and in C++, and the walls between code of different ISA levels.

    api -> plan -> modules -> ops -> kernels -> tiles, with csrc/runtime under all C++

The checks of compiled code look at the objects of the newest build below build/, or of the build directory named by
XOPT_TEST_BUILD, and are skipped where there is none.
"""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from xopt import _C

ROOT = pathlib.Path(__file__).parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "xopt"
LEVELS = _C.isa_levels()

# A part may import what stands on a lower floor, and itself.
PYTHON_FLOORS = {
    "_C": 0,
    "machine": 0,
    "roofs": 1,
    "_sycl": 0,
    "config": 1,
    "capabilities": 1,
    "runtime": 2,
    "sycl": 2,
    "ops": 2,
    "tuning": 2,
    "graph": 3,
    "modules": 4,
    "integrations": 5,
    "plan": 5,
    "report": 6,
    "api": 7,
    "tune": 7,
    "checkpoint": 8,
}
# Parts that use the package's public names, and that nothing in the package uses. Three parts more are open to them:
# the native module and the machine's roofs, since what is measured is no part of the public face, and what Linux tells,
# which the launcher has to know without torch.
OPEN_TO_LEAVES = {"", "_C", "machine", "roofs"}
PYTHON_LEAVES = {"__main__", "bench", "launch", "profiling"}
# Those whose names `import xopt` hands out, importing them when they are first asked for.
LAZY_LEAVES = {"profiling"}

CPP_FLOORS = {"pool": 0, "runtime": 1, "tiles": 2, "kernels": 3, "ops": 4, "sycl": 4, "bindings": 5}

STL_CONTAINERS = {
    *("any", "array", "deque", "forward_list", "functional", "iostream", "list", "map", "memory", "optional", "queue"),
    *("set", "span", "sstream", "stack", "string", "string_view", "unordered_map", "unordered_set", "valarray"),
    *("variant", "vector"),
}


# ---- Python ---------------------------------------------------------------------------------------------------------


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: xopt.plan.fold -> plan; xopt itself -> ""."""
    return module.partition(".")[2].partition(".")[0]


def imported_parts(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Parts of xopt that a file imports, anywhere in it, with the line; "" for the package's public names."""
    package = ("xopt", *path.relative_to(PACKAGE).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (
                (part_of(alias.name), node.lineno) for alias in node.names if alias.name.split(".")[0] == "xopt"
            )
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            if module == "xopt":
                for alias in node.names:
                    is_module = (PACKAGE / alias.name).is_dir() or list(PACKAGE.glob(f"{alias.name}.py*"))
                    yield alias.name if is_module else "", node.lineno
            elif module.startswith("xopt."):
                yield part_of(module), node.lineno


def python_edge_error(importer: str, imported: str) -> str | None:
    if importer == imported or (importer == "__init__" and imported not in PYTHON_LEAVES - LAZY_LEAVES):
        return None
    if importer in PYTHON_LEAVES:
        return (
            None
            if imported in OPEN_TO_LEAVES
            else f"the leaf {importer} may use public names only, not xopt.{imported}"
        )
    for part in (importer, imported):
        if part not in PYTHON_FLOORS and part not in PYTHON_LEAVES:
            return f"{part or 'xopt'} has no floor in this test: modules import each other by name, not through xopt"
    if imported in PYTHON_LEAVES:
        return f"xopt.{imported} is a leaf: nothing in the package uses it"
    if PYTHON_FLOORS[imported] < PYTHON_FLOORS[importer]:
        return None
    return f"xopt.{importer} may not import xopt.{imported}: it does not stand below"


def test_python_imports_run_downwards() -> None:
    errors = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        importer = relative.parts[0].removesuffix(".py")
        for imported, line in imported_parts(path):
            error = python_edge_error(importer, imported)
            if error:
                errors.append(f"{path.relative_to(ROOT)}:{line}: {error}")
    assert not errors, "\n".join(errors)


def test_only_config_reads_the_environment() -> None:
    reading = re.compile(r"\bos\.(environ|getenv)\b")
    floors = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in PYTHON_LEAVES]
    readers = [str(path.relative_to(PACKAGE)) for path in floors if reading.search(path.read_text())]
    assert readers == ["config.py"]


@pytest.mark.parametrize(
    ("importer", "imported"),
    [("ops", "modules"), ("modules", "plan"), ("plan", "api"), ("plan", "bench"), ("bench", "plan")],
)
def test_an_upward_import_is_seen(importer: str, imported: str) -> None:
    assert python_edge_error(importer, imported)
    assert python_edge_error("api", "plan") is None


# ---- C++ includes ---------------------------------------------------------------------------------------------------


def cpp_files(*parts: str) -> list[pathlib.Path]:
    return sorted(path for part in parts for path in (CSRC / part).rglob("*") if path.suffix in (".h", ".cpp"))


def includes_of(path: pathlib.Path) -> list[tuple[str, str]]:
    """Each include as (kind, name), where kind is the opening mark: < or "."""
    return re.findall(r"^\s*#\s*include\s*([<\"])([^>\"]+)", path.read_text(), re.MULTILINE)


def reached_by(path: pathlib.Path) -> set[pathlib.Path]:
    """The file and all project headers that it includes, over however many steps."""
    reached, waiting = set(), [path]
    while waiting:
        current = waiting.pop()
        if current not in reached:
            reached.add(current)
            waiting += [CSRC / name for kind, name in includes_of(current) if kind == '"' and (CSRC / name).exists()]
    return reached


def test_cpp_includes_run_downwards() -> None:
    errors = []
    for path in cpp_files(*(part for part in CPP_FLOORS if (CSRC / part).is_dir())):
        part = path.relative_to(CSRC).parts[0]
        for kind, name in includes_of(path):
            if kind == "<":
                continue
            included = name.partition("/")[0]
            if not (CSRC / name).exists():
                errors.append(f"{path.relative_to(ROOT)}: {name} is not a path below csrc/")
            elif included != part and CPP_FLOORS[included] >= CPP_FLOORS[part]:
                errors.append(f"{path.relative_to(ROOT)}: {part} includes {name}, which does not stand below it")
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("part", ["kernels", "tiles"])
def test_kernels_and_tiles_include_neither_torch_nor_containers(part: str) -> None:
    errors = []
    for path in cpp_files(part):
        for header in reached_by(path):
            for _, name in includes_of(header):
                if name in STL_CONTAINERS or name.split("/")[0] in ("torch", "ATen", "c10", "Python.h", "pybind11"):
                    errors.append(f"{path.relative_to(ROOT)}: <{name}>, included by {header.relative_to(ROOT)}")
    assert not errors, "\n".join(sorted(errors))


def test_the_pool_stands_alone() -> None:
    """It is a library of its own, preloaded into processes that may know nothing of xopt."""
    used = [name for path in cpp_files("pool") for kind, name in includes_of(path) if kind == '"']
    assert used
    assert {name.partition("/")[0] for name in used} == {"pool"}
    containers = [name for path in cpp_files("pool") for _, name in includes_of(path) if name in STL_CONTAINERS]
    assert not containers


def test_only_ops_know_torch() -> None:
    errors = [
        f"{path.relative_to(ROOT)}: <{name}>"
        for path in cpp_files("pool", "runtime", "kernels", "tiles", "bindings")
        for _, name in includes_of(path)
        if name.startswith(("torch/", "ATen/", "c10/"))
    ]
    assert not errors, "\n".join(errors)


# ---- Compiled code --------------------------------------------------------------------------------------------------


@functools.cache
def build_directory() -> pathlib.Path | None:
    """The build whose objects are checked; never one with sanitizers, which add symbols of their own."""
    named = os.environ.get("XOPT_TEST_BUILD")
    candidates = (
        [pathlib.Path(named)] if named else [cache.parent for cache in (ROOT / "build").glob("*/CMakeCache.txt")]
    )
    plain = []
    for candidate in candidates:
        cache = (candidate / "CMakeCache.txt").read_text()
        objects = list(candidate.glob("CMakeFiles/xopt_kernels_*.dir/**/*.o"))
        if objects and re.search(r"^XOPT_SANITIZE:\w+=$", cache, re.MULTILINE):
            plain.append((max(path.stat().st_mtime for path in objects), candidate))
    return max(plain)[1] if plain else None


def objects_of(target: str, tool: str) -> list[pathlib.Path]:
    if shutil.which(tool) is None:
        pytest.skip(f"NOT RUN: there is no {tool}")
    build = build_directory()
    if build is None:
        pytest.skip("NOT RUN: no build directory with objects (below build/, or named by XOPT_TEST_BUILD)")
    return sorted((build / "CMakeFiles").glob(f"{target}.dir/**/*.o"))


def tool_output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions_in(disassembly: str) -> Iterator[tuple[str, list[str]]]:
    name = ""
    lines: list[str] = []
    for line in disassembly.splitlines():
        start = re.match(r"[0-9a-f]+ <(.+)>:$", line)
        if start:
            if lines:
                yield name, lines
            name, lines = start[1], []
        elif line.startswith(" "):
            lines.append(line.partition("\t")[2])
    if lines:
        yield name, lines


@pytest.mark.parametrize("level", LEVELS)
def test_symbols_of_a_level_lie_in_its_namespace(level: str) -> None:
    """The linker keeps one copy of an inline function: one compiled for AVX-512 must never serve an AVX2 run."""
    objects = objects_of(f"xopt_kernels_{level}", "nm")
    assert objects, f"no kernel is compiled for {level}"
    strangers = []
    for path in objects:
        for line in tool_output("nm", "--demangle", "--defined-only", "--extern-only", str(path)).splitlines():
            symbol = line.split(maxsplit=2)[2]
            # Lambdas within lambdas can be more than nm can read: then the namespace stands there as it is written,
            # behind xopt's, which is S_ where it has been named before.
            written = rf"(4xopt|S_){len(level)}{level}" if symbol.startswith("_Z") else f"xopt::{level}::"
            if not re.search(written, symbol) and not symbol.startswith("DW.ref."):
                strangers.append(f"{path.name}: {symbol}")
    assert not strangers, "\n".join(strangers)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_what_a_level_runs_at_load_time_runs_on_any_cpu(level: str) -> None:
    """Kernels register themselves while the library is loaded, on whatever CPU that is."""
    errors = []
    for path in objects_of(f"xopt_kernels_{level}", "objdump"):
        for name, lines in functions_in(tool_output("objdump", "-d", "--no-show-raw-insn", str(path))):
            if "_GLOBAL__sub_I" in name or "__static_initialization" in name:
                errors += [f"{path.name}: {name}: {line}" for line in lines if re.search(r"%[xyz]mm|%k[0-7]", line)]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("target", ["xopt_baseline", "xopt_kernels_scalar", "xopt_ops", "xopt_bindings"])
def test_code_below_the_levels_runs_on_any_cpu(target: str) -> None:
    """Instructions of AVX and above have names in v (but verr and verw) or use registers that SSE does not have."""
    errors = []
    for path in objects_of(target, "objdump"):
        for name, lines in functions_in(tool_output("objdump", "-d", "--no-show-raw-insn", str(path))):
            advanced = [
                line for line in lines if re.search(r"%[yz]mm|%tmm|%k[0-7]", line) or re.match(r"v(?!err|erw)", line)
            ]
            errors += [f"{path.name}: {name}: {line}" for line in advanced[:1]]
    assert not errors, "\n".join(errors)
