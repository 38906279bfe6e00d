"""The launcher's view of machines: recorded ones, synthetic ones, and this one."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests import machine_trees
from tests.machine_trees import Machine, topology_of
from xopt.launch import topology
from xopt.machine import format_list, parse_list


def first_cpus(found: topology.Topology) -> tuple[int, ...]:
    return tuple(core.cpus[0] for core in found.cores)


def test_two_sockets_with_sub_numa_clusters(tmp_path: pathlib.Path) -> None:
    found = topology_of(machine_trees.spr_snc4(), tmp_path)
    assert len(found.cores) == 112
    assert [node.number for node in found.nodes] == list(range(8))
    assert found.cores[0].siblings == (0, 112)
    assert {core.node for core in found.cores if core.socket == 1} == {4, 5, 6, 7}
    assert sum(core.node == 3 for core in found.cores) == 14
    assert found.quota is None
    assert not found.virtual
    assert not found.hybrid


def test_one_socket(tmp_path: pathlib.Path) -> None:
    found = topology_of(machine_trees.emr(), tmp_path)
    assert first_cpus(found) == tuple(range(64))
    assert {core.siblings for core in found.cores} == {(cpu, cpu + 64) for cpu in range(64)}


def test_siblings_side_by_side_are_one_core(tmp_path: pathlib.Path) -> None:
    """Whoever takes the first half of the CPUs for the cores has both threads of half of them."""
    found = topology_of(Machine(cores_per_node=4, adjacent_siblings=True, virtual=True), tmp_path)
    assert first_cpus(found) == (0, 2, 4, 6)
    assert found.virtual


@pytest.mark.parametrize("shown", ["synthetic", "recorded"])
def test_a_cloud_vm_that_masks_siblings(shown: str, tmp_path: pathlib.Path) -> None:
    found = (
        machine_trees.recorded("cloud_vm_2_cpus", tmp_path)
        if shown == "recorded"
        else topology_of(machine_trees.masked_cloud_vm(), tmp_path)
    )
    assert [core.siblings for core in found.cores] == [(0,), (1,)]
    assert found.virtual
    assert found.quota is None


def test_a_container_with_cpuset_and_quota(tmp_path: pathlib.Path) -> None:
    found = topology_of(machine_trees.small_container(), tmp_path)
    assert first_cpus(found) == (8, 9, 10, 11)
    assert [core.siblings for core in found.cores] == [(cpu, cpu + 32) for cpu in range(8, 12)]
    assert [core.cpus for core in found.cores] == [(cpu,) for cpu in range(8, 12)]
    assert found.quota == 1.5
    assert len(found.forbidden) == 60


def test_a_cpuset_that_the_affinity_does_not_show(tmp_path: pathlib.Path) -> None:
    files = machine_trees.cgroup_v2("/pod/box", cpuset_cpus_effective="2-3,40")
    found = topology_of(Machine(cores_per_node=32, files=files), tmp_path)
    assert found.cpus == (2, 3, 40)


def test_cgroup_version_1(tmp_path: pathlib.Path) -> None:
    files = machine_trees.cgroup_v1(
        "/docker/0123",
        cpuset={"cpus": "0-7", "effective_cpus": "4-7", "mems": "0-1", "effective_mems": "1"},
        cpu={"cfs_quota_us": "250000", "cfs_period_us": "100000"},
    )
    found = topology_of(Machine(sockets=2, cores_per_node=8, files=files), tmp_path)
    assert found.cpus == (4, 5, 6, 7)
    assert found.quota == 2.5
    assert [node.usable for node in found.nodes] == [False, True]
    assert found.memory_node_of(0) == 1


def test_the_tightest_quota_of_the_groups_around_counts(tmp_path: pathlib.Path) -> None:
    files = {
        **machine_trees.cgroup_v2("/pod/box", cpu_max="max 100000"),
        "sys/fs/cgroup/pod/cpu.max": "300000 100000",
    }
    assert topology_of(Machine(files=files), tmp_path).quota == 3


def test_hybrid(tmp_path: pathlib.Path) -> None:
    found = topology_of(machine_trees.hybrid_desktop(), tmp_path)
    assert found.hybrid
    assert [core.efficient for core in found.cores] == [False] * 8 + [True] * 8
    assert first_cpus(found) == (*range(0, 16, 2), *range(16, 24))


def test_epyc(tmp_path: pathlib.Path) -> None:
    found = topology_of(machine_trees.epyc_8_nodes(), tmp_path)
    assert [sum(core.node == node for core in found.cores) for node in range(8)] == [16] * 8


def test_offline_cpus(tmp_path: pathlib.Path) -> None:
    """1 and 9 are one core, of 8 the sibling is gone."""
    found = topology_of(Machine(cores_per_node=8, offline=(1, 9, 8)), tmp_path)
    assert found.offline == (1, 8, 9)
    assert first_cpus(found) == (0, 2, 3, 4, 5, 6, 7)
    assert found.cores[0].siblings == (0,)
    assert found.cores[1].siblings == (2, 10)


def test_a_core_whose_first_thread_is_offline_is_used_by_its_second(tmp_path: pathlib.Path) -> None:
    found = topology_of(Machine(cores_per_node=4, offline=(2,)), tmp_path)
    assert [core.cpus for core in found.cores] == [(0, 4), (1, 5), (3, 7), (6,)]


def test_nodes_without_memory_and_without_cpus(tmp_path: pathlib.Path) -> None:
    machine = Machine(sockets=2, nodes_per_socket=2, memory={1: 0, 3: 0}, extra_memory_nodes=1)
    found = topology_of(machine, tmp_path)
    assert [found.memory_node_of(node) for node in range(4)] == [0, 0, 2, 2]
    assert {core.node for core in found.cores} == {0, 1, 2, 3}


def test_memory_nodes_that_are_not_allowed(tmp_path: pathlib.Path) -> None:
    found = topology_of(Machine(sockets=2, mems_allowed="1"), tmp_path)
    assert [found.memory_node_of(node) for node in range(2)] == [1, 1]


def test_a_kernel_without_numa(tmp_path: pathlib.Path) -> None:
    found = topology_of(Machine(numa=False), tmp_path)
    assert [(node.number, node.memory_bytes) for node in found.nodes] == [(0, 64 * machine_trees.GIGABYTE)]
    assert {core.node for core in found.cores} == {0}
    assert found.memory_node_of(0) == 0


def test_a_machine_that_tells_nothing(tmp_path: pathlib.Path) -> None:
    """Sandboxes show hardly any file: each CPU that may be used is taken for a core."""
    found = topology.read(tmp_path, affinity={0, 1, 2})
    assert [core.siblings for core in found.cores] == [(0,), (1,), (2,)]


def test_this_machine() -> None:
    found = topology.read_own()
    assert set(found.cpus) <= os.sched_getaffinity(0)
    assert found.cores
    assert all(set(core.cpus) <= set(core.siblings) for core in found.cores)


def test_the_affinity_counts() -> None:
    everything = os.sched_getaffinity(0)
    one = min(everything)
    os.sched_setaffinity(0, {one})
    try:
        assert topology.read_own().cpus == (one,)
    finally:
        os.sched_setaffinity(0, everything)


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("5, 2-3", (5, 2, 3)), ("7-7", (7,)), ("", ())]
)
def test_lists(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_list(text) == numbers
    assert parse_list(format_list(numbers)) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "0x1"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected numbers|downwards"):
        parse_list(text)
