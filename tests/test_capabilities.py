"""What the machine is found to be: levels, caps, limits, and the command that shows them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import pytest
import torch

import xopt
from tests import fresh_process
from xopt import _C, machine
from xopt.config import Environment

LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")

# What each level adds to the one below it.
STEPS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"avx512vbmi", "amx_tile", "amx_int8", "amx_bf16", "amx_permitted"},
}


def features_up_to(level: str) -> set[str]:
    return set().union(*(STEPS[step] for step in LEVELS[1 : LEVELS.index(level) + 1]))


def level_of(features: set[str]) -> str:
    return _C.level_of(dict.fromkeys(features, True))


# ---- Levels ---------------------------------------------------------------------------------------------------------


def test_level_names_and_order() -> None:
    assert _C.isa_levels() == LEVELS


@pytest.mark.parametrize("level", LEVELS)
def test_level_of_features(level: str) -> None:
    assert level_of(features_up_to(level)) == level


@pytest.mark.parametrize(
    ("lacking", "level"),
    [(feature, LEVELS[LEVELS.index(step) - 1]) for step in STEPS for feature in sorted(STEPS[step])],
)
def test_a_lacking_feature_takes_away_its_level_and_all_above(lacking: str, level: str) -> None:
    assert level_of(features_up_to("amx") - {lacking}) == level


def test_emulation_stands_on_vnni() -> None:
    assert level_of(features_up_to("avx512_vnni") | {"emulated"}) == "amx"
    assert level_of(features_up_to("avx512") | {"emulated"}) == "avx512"


def test_an_unknown_feature_is_refused() -> None:
    with pytest.raises(ValueError, match="avx1024"):
        _C.level_of({"avx1024": True})


def test_features_agree_with_the_kernel() -> None:
    """Linux lists a feature when the CPU has it and the system saves its registers: just what counts here."""
    text = machine.read_text(pathlib.Path("/proc/cpuinfo")) or ""
    lines = [line for line in text.splitlines() if line.startswith("flags")]
    if not lines:
        pytest.skip("NOT RUN: /proc/cpuinfo tells no flags")
    flags = set(lines[0].partition(":")[2].split())
    features = {
        name: present for name, present in _C.cpu_features().items() if name not in ("emulated", "amx_permitted")
    }
    del features["amx_fp16"]  # older systems do not list it
    assert features == {name: name in flags for name in features}


# ---- XOPT_MAX_ISA ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_max_isa_caps_the_level(level: str) -> None:
    expected = min(level, _C.detected_isa(), key=LEVELS.index)
    assert fresh_process.output_of("import xopt; print(xopt.capabilities().level)", XOPT_MAX_ISA=level) == expected


def test_without_max_isa_the_level_is_the_detected_one() -> None:
    program = "import xopt; found = xopt.capabilities(); print(found.level, found.levels[-1])"
    assert fresh_process.output_of(program) == f"{_C.detected_isa()} {_C.detected_isa()}"
    assert fresh_process.output_of(program, XOPT_MAX_ISA="") == f"{_C.detected_isa()} {_C.detected_isa()}"


def test_an_unknown_max_isa_is_an_error_that_lists_the_known() -> None:
    done = fresh_process.run("-c", "import xopt", XOPT_MAX_ISA="avx3")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"ValueError: XOPT_MAX_ISA: unknown level 'avx3'; known levels: {', '.join(LEVELS)}"


def test_cap_isa_can_be_raised_again() -> None:
    before = _C.active_isa()
    try:
        _C.cap_isa("scalar")
        assert _C.active_isa() == "scalar"
        _C.cap_isa("amx")
        assert _C.active_isa() == _C.detected_isa()
        with pytest.raises(ValueError, match=r"unknown ISA level 'sse'; known levels: scalar, avx2"):
            _C.cap_isa("sse")
    finally:
        _C.cap_isa(before)


def test_config_is_frozen_and_reads_what_it_is_given() -> None:
    config = Environment.read({"XOPT_MAX_ISA": "avx2"})
    assert config == Environment(max_isa="avx2")
    assert Environment.read({}) == Environment()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, "max_isa", "amx")  # noqa: B010 - an assignment would be refused by mypy


# ---- capabilities() and python -m xopt ------------------------------------------------------------------------------


def test_capabilities_of_this_process() -> None:
    found = xopt.capabilities()
    assert found.levels == LEVELS[: LEVELS.index(_C.detected_isa()) + 1]
    assert found.level in found.levels
    assert found.xopt_version == xopt.__version__
    assert found.torch_version == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert set(found.affinity) == os.sched_getaffinity(0)
    assert found.huge_pages in ("always", "madvise", "never", "unknown")
    assert found.cpu
    assert found.cpu == found.cpu.strip()
    if found.features["avx2"]:
        assert 8 << 10 <= found.caches.l1d_bytes <= 1 << 20
        assert found.caches.l1d_bytes < found.caches.l2_bytes


@pytest.mark.parametrize("level", [None, "scalar"])
def test_the_command_prints_tables(level: str | None) -> None:
    done = fresh_process.run("-m", "xopt", COLUMNS="200", **({"XOPT_MAX_ISA": level} if level else {}))
    assert done.returncode == 0, done.stderr
    found = xopt.capabilities()
    for text in (
        found.cpu,
        torch.__version__,
        found.allocator,
        "matrix shapes" if xopt.sycl.available() else "not installed",
        f"chosen at {level or found.levels[-1]}",
    ):
        assert text in done.stdout
    for name in {kernel.name for kernel in xopt.kernels()}:
        assert name in done.stdout


def test_the_command_prints_json() -> None:
    done = fresh_process.run("-m", "xopt", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert set(printed) == {field.name for field in dataclasses.fields(xopt.Capabilities)} | {"kernels", "sycl_devices"}
    assert printed["levels"] == list(xopt.capabilities().levels)
    assert len(printed["kernels"]) == len(xopt.kernels())
    assert (printed["sycl_devices"] is not None) == xopt.sycl.available()


def test_rich_is_imported_only_for_tables() -> None:
    program = """
        import sys, xopt
        from xopt.__main__ import main
        main(["--json"])
        sys.stdout.flush()
        print("rich" in sys.modules, file=sys.stderr)
    """
    done = fresh_process.run("-c", "\n".join(line.strip() for line in program.splitlines()))
    assert done.stderr.strip() == "False", done.stderr


# ---- Other machines, as files below a root --------------------------------------------------------------------------


def write_files(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def mount_line(group: str, directory: str, kind: str, options: str) -> str:
    return f"35 24 0:30 {group} {directory} rw,nosuid shared:9 - {kind} cgroup {options}"


def test_cgroup_v2_takes_the_tightest_of_all_groups_around(tmp_path: pathlib.Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner",
            "proc/self/mountinfo": mount_line("/", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate"),
            "sys/fs/cgroup/outer/cpu.max": "150000 100000",
            "sys/fs/cgroup/outer/memory.max": "max",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000",
            "sys/fs/cgroup/outer/inner/memory.max": "2147483648",
        },
    )
    assert machine.cgroup_limits(root) == machine.CgroupLimits(2, 1.5, 2 << 30)


def test_cgroup_v1_in_a_container_that_sees_only_its_own_tree(tmp_path: pathlib.Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc",
            "proc/self/mountinfo": "\n".join(
                [
                    mount_line("/docker/abc", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
                    mount_line("/docker/abc", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
                ]
            ),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert machine.cgroup_limits(root) == machine.CgroupLimits(1, 4.0, None)


def test_no_files_at_all_are_no_error(tmp_path: pathlib.Path) -> None:
    assert machine.cgroup_limits(tmp_path) == machine.CgroupLimits(0, None, None)
    assert machine.numa_nodes(tmp_path) == ()
    assert machine.huge_pages(tmp_path) == "unknown"
    assert machine.openmp_runtimes(tmp_path) == ()


def test_numa_nodes(tmp_path: pathlib.Path) -> None:
    nodes = "sys/devices/system/node"
    root = write_files(
        tmp_path,
        {
            f"{nodes}/node1/cpulist": "4-7",
            f"{nodes}/node1/meminfo": "Node 1 MemTotal:  2048 kB\nNode 1 MemFree:  1 kB",
            f"{nodes}/node0/cpulist": "0-3",
            f"{nodes}/node0/meminfo": "Node 0 MemTotal:  1024 kB",
            f"{nodes}/online": "0-1",
        },
    )
    assert machine.numa_nodes(root) == (machine.NumaNode(0, "0-3", 1 << 20), machine.NumaNode(1, "4-7", 2 << 20))


def test_libraries_are_told_by_their_names(tmp_path: pathlib.Path) -> None:
    line = "7f0000000000-7f0000001000 r-xp 00000000 08:01 123                        "
    paths = ["/a dir/libgomp-24e2ab19.so.1.0.0", "/b/libgomp_user.so", "/c/libiomp5.so", "/d/libtcmalloc_minimal.so.4"]
    root = write_files(tmp_path, {"proc/self/maps": "\n".join([line + path for path in paths * 2] + [line + "[heap]"])})
    assert machine.openmp_runtimes(root) == (paths[0], paths[2])
    assert machine.allocator(root) == "tcmalloc"


def test_huge_pages(tmp_path: pathlib.Path) -> None:
    root = write_files(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"})
    assert machine.huge_pages(root) == "madvise"
