"""What each instance gets on machines of all kinds, and what is refused, with the numbers."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from tests import machine_trees
from tests.machine_trees import Machine, topology_of
from xopt.launch import libraries, openmp
from xopt.launch.allocator import Allocator
from xopt.launch.allocator import choose as choose_allocator
from xopt.launch.errors import LaunchError
from xopt.launch.openmp import OpenMP
from xopt.launch.placement import Placements, Request, place
from xopt.launch.plan import MemoryPolicy, Plan, Settings, make_plan
from xopt.machine import format_list

GNU = OpenMP("gnu", None, "GNU's.")
INTEL = OpenMP("intel", pathlib.Path("/lib/libiomp5.so"), "Intel's.")
MALLOC = Allocator("default", None, "malloc.")


def placed(machine: Machine, root: pathlib.Path, **asked: Any) -> Placements:
    return place(topology_of(machine, root), Request(**asked))


def cores_of(machine: Machine, root: pathlib.Path, **asked: Any) -> list[str]:
    return [format_list(instance.cpus) for instance in placed(machine, root, **asked).instances]


def refusal(machine: Machine, root: pathlib.Path, **asked: Any) -> str:
    with pytest.raises(LaunchError) as caught:
        placed(machine, root, **asked)
    return str(caught.value)


def planned(
    machine: Machine,
    root: pathlib.Path,
    asked: Request | None = None,
    environment: dict[str, str] | None = None,
    allocator: Allocator = MALLOC,
    runtime: OpenMP = GNU,
    **settings: Any,
) -> Plan:
    topology = topology_of(machine, root)
    common = Settings(("python", "s.py"), allocator, runtime, environment or {}, **settings)
    return make_plan(topology, place(topology, asked or Request()), common)


# ---- Cores ----------------------------------------------------------------------------------------------------------


def test_one_instance_has_all_cores_once(tmp_path: pathlib.Path) -> None:
    assert cores_of(machine_trees.spr_snc4(), tmp_path) == ["0-111"]


def test_throughput_mode_on_sub_numa_clusters(tmp_path: pathlib.Path) -> None:
    expected = [f"{14 * node}-{14 * node + 13}" for node in range(8)]
    found = placed(machine_trees.spr_snc4(), tmp_path, throughput_mode=True)
    assert [format_list(instance.cpus) for instance in found.instances] == expected
    assert [instance.nodes for instance in found.instances] == [(node,) for node in range(8)]


def test_latency_mode(tmp_path: pathlib.Path) -> None:
    assert cores_of(machine_trees.emr(), tmp_path, latency_mode=True) == [
        f"{first}-{first + 3}" for first in range(0, 64, 4)
    ]


def test_even_division(tmp_path: pathlib.Path) -> None:
    assert cores_of(machine_trees.emr(), tmp_path, ninstances=4) == ["0-15", "16-31", "32-47", "48-63"]
    assert cores_of(machine_trees.emr(), tmp_path, ncores_per_instance=32) == ["0-31", "32-63"]


def test_siblings_stay_idle_unless_asked_for(tmp_path: pathlib.Path) -> None:
    machine = Machine(cores_per_node=4)
    assert cores_of(machine, tmp_path, ninstances=2) == ["0-1", "2-3"]
    found = placed(machine, tmp_path, ninstances=2, use_logical_cores=True).instances
    assert [instance.cpus for instance in found] == [(0, 4, 1, 5), (2, 6, 3, 7)]


def test_a_vm_with_siblings_side_by_side(tmp_path: pathlib.Path) -> None:
    machine = Machine(cores_per_node=4, adjacent_siblings=True, virtual=True)
    assert cores_of(machine, tmp_path, ninstances=2) == ["0,2", "4,6"]


def test_a_vm_with_masked_siblings(tmp_path: pathlib.Path) -> None:
    found = placed(machine_trees.masked_cloud_vm(), tmp_path, ninstances=2)
    assert [instance.cpus for instance in found.instances] == [(0,), (1,)]
    assert any("shows no siblings" in reason for reason in found.reasons)


def test_hybrid_leaves_e_cores_out_unless_asked_for(tmp_path: pathlib.Path) -> None:
    machine = machine_trees.hybrid_desktop()
    assert cores_of(machine, tmp_path) == ["0,2,4,6,8,10,12,14"]
    assert cores_of(machine, tmp_path, use_e_cores=True) == ["0,2,4,6,8,10,12,14,16-23"]
    assert cores_of(machine, tmp_path, use_logical_cores=True) == ["0-15"]
    assert cores_of(machine, tmp_path, cores_list=(14, 16)) == ["14,16"]


def test_epyc_by_nodes(tmp_path: pathlib.Path) -> None:
    machine = machine_trees.epyc_8_nodes()
    assert cores_of(machine, tmp_path, nodes_list=(6, 7), ninstances=2) == ["96-111", "112-127"]
    assert len(cores_of(machine, tmp_path, throughput_mode=True)) == 8


def test_a_quota_limits_threads_and_binds_none_of_them(tmp_path: pathlib.Path) -> None:
    found = placed(machine_trees.small_container(), tmp_path)
    (instance,) = found.instances
    assert (instance.cpus, instance.threads, instance.fixed) == ((8, 9, 10, 11), 1, False)
    assert any("1.5 CPUs" in reason for reason in found.reasons)
    assert "2 instances of 1 cores need 2 cores, and 1 are usable" in refusal(
        machine_trees.small_container(), tmp_path, ninstances=2, ncores_per_instance=1
    )


def test_a_list_of_cores_is_granted_beyond_a_quota(tmp_path: pathlib.Path) -> None:
    (instance,) = placed(machine_trees.small_container(), tmp_path, cores_list=(9, 10)).instances
    assert (instance.cpus, instance.threads, instance.fixed) == ((9, 10), 2, True)


def test_offline_cpus_are_left_out(tmp_path: pathlib.Path) -> None:
    machine = Machine(cores_per_node=8, offline=(1, 9, 2))
    found = placed(machine, tmp_path)
    assert [format_list(instance.cpus) for instance in found.instances] == ["0,3-7,10"]
    assert "CPUs 1-2,9 are offline." in found.reasons


@pytest.mark.parametrize(
    ("strategy", "expected"), [("scatter", ["0-3", "8-11"]), ("close", ["0-3", "4-7"])], ids=["scatter", "close"]
)
def test_strategy(strategy: str, expected: list[str], tmp_path: pathlib.Path) -> None:
    machine = Machine(sockets=2, cores_per_node=8)
    assert cores_of(machine, tmp_path, ninstances=2, ncores_per_instance=4, strategy=strategy) == expected


def test_binding_to_nodes_takes_no_instance_across(tmp_path: pathlib.Path) -> None:
    machine = Machine(sockets=2, cores_per_node=6)
    assert cores_of(machine, tmp_path, ncores_per_instance=4, ninstances=3) == ["0-3", "4-7", "8-11"]
    found = placed(machine, tmp_path, ninstances=4, bind_numa_node=True)
    assert [format_list(instance.cpus) for instance in found.instances] == ["0-2", "3-5", "6-8", "9-11"]
    assert "3 instances of 4 cores do not fit into nodes of 6, 6 cores: 2 would" in refusal(
        machine, tmp_path, ncores_per_instance=4, ninstances=3, bind_numa_node=True
    )


def test_oversubscription(tmp_path: pathlib.Path) -> None:
    machine = Machine(cores_per_node=2, threads=1)
    found = placed(machine, tmp_path, ninstances=32, oversubscribe=True).instances
    assert [instance.cpus for instance in found] == [(0,), (1,)] * 16
    assert not any(instance.fixed for instance in found)


# ---- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"ninstances": 32}, r"32 instances of 1 cores need 32 cores, and 16 are usable"),
        ({"ninstances": 3}, r"3 instances of 5 cores leave 1 of 16 cores idle.*--ninstances 3 --ncores-per-instance 5"),
        ({"ncores_per_instance": 5}, r"3 instances of 5 cores leave 1 of 16"),
        ({"ncores_per_instance": 17}, r"an instance of 17 cores does not fit: usable are 16"),
        ({"ncores_per_instance": 9, "bind_numa_node": True}, r"9 cores does not fit: the largest node has 8"),
        ({"ninstances": 3, "ncores_per_instance": 8}, r"3 instances of 8 cores need 24 cores, and 16 are usable"),
        ({"ninstances": 0}, r"--ninstances: expected 1 or more, got 0"),
        ({"ncores_per_instance": -1}, r"--ncores-per-instance: expected 1 or more, got -1"),
        ({"cores_list": (0, 1, 1)}, r"--cores-list: 1 listed more than once"),
        ({"cores_list": (0, 99)}, r"--cores-list: 99 cannot be used; usable are 0-31"),
        ({"nodes_list": (2,)}, r"--nodes-list: node 2 does not exist; nodes with usable CPUs are 0-1"),
        ({"cores_list": (0,), "nodes_list": (0,)}, r"only one of them"),
        ({"latency_mode": True, "throughput_mode": True}, r"only one of them"),
        ({"latency_mode": True, "ninstances": 2}, r"--latency-mode and --ninstances"),
        ({"throughput_mode": True, "oversubscribe": True}, r"--oversubscribe and --throughput-mode"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_refusals_name_the_numbers(asked: dict[str, Any], expected: str, tmp_path: pathlib.Path) -> None:
    assert re.search(expected, refusal(Machine(sockets=2, cores_per_node=8), tmp_path, **asked))


def test_cores_that_are_offline_or_kept_away_are_told_apart(tmp_path: pathlib.Path) -> None:
    machine = Machine(cores_per_node=4, threads=1, offline=(1,), affinity="0,2")
    said = refusal(machine, tmp_path, cores_list=(0, 1, 3))
    assert "1,3 cannot be used: 1 offline, 3 kept from this process" in said
    assert said.endswith("usable are 0,2")


def test_latency_mode_needs_four_cores(tmp_path: pathlib.Path) -> None:
    said = refusal(machine_trees.masked_cloud_vm(), tmp_path, latency_mode=True)
    assert "an instance of 4 cores does not fit: usable are 2" in said


def test_a_node_without_usable_cpus(tmp_path: pathlib.Path) -> None:
    said = refusal(Machine(sockets=2, cores_per_node=2, affinity="0-1"), tmp_path, nodes_list=(1,))
    assert "node 1 has no CPU that may be used" in said


# ---- Memory ---------------------------------------------------------------------------------------------------------


def test_memory_policies(tmp_path: pathlib.Path) -> None:
    each = Request(throughput_mode=True)
    machine = Machine(sockets=2, cores_per_node=2)
    preferring = planned(machine, tmp_path, each).instances
    assert [instance.memory for instance in preferring] == [MemoryPolicy("prefer", (0,)), MemoryPolicy("prefer", (1,))]
    binding = planned(machine, tmp_path, each, bind_memory=True).instances
    assert [instance.memory for instance in binding] == [MemoryPolicy("bind", (0,)), MemoryPolicy("bind", (1,))]
    assert planned(machine, tmp_path).instances[0].memory == MemoryPolicy("local")


def test_a_node_without_memory_takes_the_nearest(tmp_path: pathlib.Path) -> None:
    machine = Machine(sockets=2, nodes_per_socket=2, memory={3: 0})
    found = planned(machine, tmp_path, Request(nodes_list=(3,)))
    assert found.instances[0].memory == MemoryPolicy("prefer", (2,))
    assert any("Node 3 has no memory" in reason for reason in found.reasons)


def test_one_node_needs_no_policy(tmp_path: pathlib.Path) -> None:
    assert planned(machine_trees.emr(), tmp_path).instances[0].memory == MemoryPolicy("local")


# ---- Environment ----------------------------------------------------------------------------------------------------


def test_environment_for_each_runtime(tmp_path: pathlib.Path) -> None:
    machine = Machine(cores_per_node=4)
    gnu = planned(machine, tmp_path, Request(ninstances=2)).instances[1].environment
    assert gnu["OMP_NUM_THREADS"] == "2"
    assert gnu["GOMP_CPU_AFFINITY"] == "2 3"
    assert [gnu[f"XOPT_LAUNCH_{name}"] for name in ("INSTANCE", "INSTANCES", "CPUS")] == ["1", "2", "2-3"]
    intel = planned(machine, tmp_path, Request(ninstances=2), runtime=INTEL).instances[1].environment
    assert intel["KMP_AFFINITY"] == "granularity=fine,proclist=[2,3],explicit"
    assert intel["KMP_BLOCKTIME"] == "1"
    assert intel["LD_PRELOAD"] == "/lib/libiomp5.so"
    unknown = planned(machine, tmp_path, runtime=OpenMP("unknown", None, "?")).instances[0].environment
    assert (unknown["OMP_PLACES"], unknown["OMP_PROC_BIND"]) == ("{0},{1},{2},{3}", "close")


def test_threads_are_bound_only_where_that_says_more_than_the_affinity(tmp_path: pathlib.Path) -> None:
    machine = Machine(cores_per_node=2)
    one_core = planned(machine, tmp_path, Request(ninstances=2)).instances[0].environment
    unbound = planned(machine, tmp_path, bind_threads=False).instances[0].environment
    assert "GOMP_CPU_AFFINITY" not in one_core
    assert "GOMP_CPU_AFFINITY" not in unbound


def test_under_a_quota_no_thread_waits_actively(tmp_path: pathlib.Path) -> None:
    environment = planned(machine_trees.small_container(), tmp_path).instances[0].environment
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "GOMP_CPU_AFFINITY" not in environment


def test_the_users_environment_wins_and_is_reported(tmp_path: pathlib.Path) -> None:
    own = {"OMP_NUM_THREADS": "3", "LD_PRELOAD": "/lib/libmine.so"}
    found = planned(Machine(), tmp_path, environment=own, runtime=INTEL)
    environment = found.instances[0].environment
    assert "OMP_NUM_THREADS" not in environment
    assert environment["LD_PRELOAD"] == "/lib/libmine.so:/lib/libiomp5.so"
    assert found.warnings == ("OMP_NUM_THREADS=3 is set in the environment and kept; it would have been 4",)


def test_the_users_own_thread_binding_wins(tmp_path: pathlib.Path) -> None:
    found = planned(Machine(), tmp_path, environment={"OMP_PROC_BIND": "spread"})
    assert "GOMP_CPU_AFFINITY" not in found.instances[0].environment
    assert any("OMP_PROC_BIND" in reason for reason in found.reasons)


def test_one_of_the_instances(tmp_path: pathlib.Path) -> None:
    found = planned(machine_trees.emr(), tmp_path, Request(ninstances=4), only=2)
    assert [(instance.index, format_list(instance.cpus)) for instance in found.instances] == [(2, "32-47")]
    with pytest.raises(LaunchError, match="--instance-idx: expected 0 to 3, the last instance, got 4"):
        planned(machine_trees.emr(), tmp_path, Request(ninstances=4), only=4)


def test_the_plan_as_data_is_json(tmp_path: pathlib.Path) -> None:
    found = planned(Machine(), tmp_path, Request(ninstances=2), log_directory=pathlib.Path("logs"), log_prefix="a")
    data = json.loads(json.dumps(found.as_data()))
    assert data["instances"][1]["cpus"] == "2-3"
    assert data["instances"][1]["log"] == "logs/a_instance_1.log"
    assert data["instances"][1]["memory"] == {"mode": "local", "nodes": []}
    assert data["reasons"]


# ---- Allocators and runtimes ----------------------------------------------------------------------------------------


def library(root: pathlib.Path, name: str) -> pathlib.Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_auto_takes_tcmalloc_before_jemalloc(tmp_path: pathlib.Path) -> None:
    assert choose_allocator("auto", {}, [tmp_path]).name == "default"
    jemalloc = library(tmp_path, "libjemalloc.so.2")
    found = choose_allocator("auto", {}, [tmp_path])
    assert (found.name, found.library) == ("jemalloc", jemalloc)
    assert "background_thread:true" in found.environment["MALLOC_CONF"]
    tcmalloc = library(tmp_path, "libtcmalloc_minimal.so.4.5.9")
    found = choose_allocator("auto", {}, [tmp_path])
    assert (found.name, found.library) == ("tcmalloc", tcmalloc)
    assert str(tcmalloc) in found.reason
    assert choose_allocator("default", {}, [tmp_path]).library is None


@pytest.mark.parametrize(("name", "help_"), [("tcmalloc", "apt install libtcmalloc"), ("jemalloc", "libjemalloc2")])
def test_a_missing_allocator_is_an_error_that_says_how_to_install_it(
    name: str, help_: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(LaunchError, match=rf"--memory-allocator {name}: there is no lib{name}.so.*{help_}") as caught:
        choose_allocator(name, {}, [tmp_path])
    assert str(tmp_path) in str(caught.value)


def test_an_allocator_of_the_users_own_is_kept(tmp_path: pathlib.Path) -> None:
    library(tmp_path, "libtcmalloc.so.4")
    found = choose_allocator("tcmalloc", {"LD_PRELOAD": "/x/libjemalloc.so.2"}, [tmp_path])
    assert found.library is None
    assert "libjemalloc.so.2, which is kept; --memory-allocator tcmalloc is ignored" in found.reason


def test_the_pool_is_found_where_it_is_installed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LaunchError, match=r"--memory-allocator pool: there is no libxopt_pool\.so"):
        choose_allocator("pool", {}, [tmp_path])
    pool = library(tmp_path, "libxopt_pool.so")
    assert choose_allocator("pool", {}, [tmp_path]).library == pool
    assert choose_allocator("auto", {}, [tmp_path]).name == "default"
    assert choose_allocator("auto", {"LD_PRELOAD": str(pool)}, [tmp_path]).name == "user"


def test_preloaded_libraries_stand_in_the_environment(tmp_path: pathlib.Path) -> None:
    allocator = Allocator("jemalloc", pathlib.Path("/lib/libjemalloc.so.2"), "found.", {"MALLOC_CONF": "x:1"})
    environment = planned(Machine(), tmp_path, allocator=allocator, runtime=INTEL).instances[0].environment
    assert environment["LD_PRELOAD"] == "/lib/libjemalloc.so.2:/lib/libiomp5.so"
    assert environment["MALLOC_CONF"] == "x:1"


def test_the_runtime_is_the_one_that_lies_beside_torch(tmp_path: pathlib.Path) -> None:
    torch = tmp_path / "torch"
    assert openmp.choose("default", {}, [], torch).kind == "unknown"
    library(torch, "lib/libgomp-24e2ab19.so.1.0.0")
    assert openmp.choose("default", {}, [], torch).kind == "gnu"
    assert openmp.choose("default", {"LD_PRELOAD": "/x/libiomp5.so"}, [], torch).kind == "intel"


def test_intels_runtime(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LaunchError, match=r"--omp-runtime intel: there is no libiomp5.so.*pip install intel-openmp"):
        openmp.choose("intel", {}, [tmp_path], None)
    found = library(tmp_path, "libiomp5.so")
    assert openmp.choose("intel", {}, [tmp_path], None).library == found


def test_where_libraries_are_looked_for(tmp_path: pathlib.Path) -> None:
    for directory in ("own", "prefix/lib", "usr/lib64", "opt/special/lib"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "etc/ld.so.conf.d").mkdir(parents=True)
    (tmp_path / "etc/ld.so.conf.d/special.conf").write_text("# comment\n/opt/special/lib\n/not/there\n")
    own = {"LD_LIBRARY_PATH": str(tmp_path / "own")}
    found = libraries.directories(own, tmp_path, tmp_path / "prefix")
    assert [str(path.relative_to(tmp_path)) for path in found] == ["own", "prefix/lib", "opt/special/lib", "usr/lib64"]


def test_a_library_is_found_by_its_own_name_and_version(tmp_path: pathlib.Path) -> None:
    library(tmp_path, "libtcmalloc.so_old")
    library(tmp_path, "libtcmalloc.so.debug")
    assert libraries.find(["libtcmalloc.so"], [tmp_path]) is None
    named = library(tmp_path, "libtcmalloc.so.4")
    assert libraries.find(["libtcmalloc.so"], [tmp_path]) == named
