"""The host side of the SYCL part: what is kept on disk, when it waits, and what it says where something is wrong."""

from __future__ import annotations

import concurrent.futures
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn

import xopt
from tests import fresh_process
from tests.conv_cases import last
from xopt import _C, sycl
from xopt.bench.sycl import print_builds
from xopt.sycl import loading
from xopt.sycl.devices import Device, find

T = TypeVar("T")


# ---- Without the part ----------------------------------------------------------------------------------------------


def test_of_several_cpus_the_one_for_tensors_of_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(number: int, system: bool) -> Device:
        return Device(number, "a CPU", "cpu", "opencl", "1", (8,), (), True, True, system, 1024)

    there = (device(0, False), device(1, True), device(2, True))
    monkeypatch.setattr(sys.modules["xopt.sycl.devices"], "devices", lambda: there)
    assert find("cpu") is there[1]
    assert find("0") is there[0]
    with pytest.raises(RuntimeError, match="there is no SYCL device 'gpu'; there are: 0: a CPU"):
        find("gpu")


def test_without_the_part_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "built", lambda: False)
    loading.native.cache_clear()
    model = xopt.optimize(nn.Linear(4, 4).eval(), config=xopt.Config(backend="sycl"))
    try:
        assert not sycl.available()
        for use in (sycl.devices, sycl.device, lambda: model(torch.ones(1, 4))):
            with pytest.raises(ImportError, match="has no SYCL part; get it by `make xpu`") as caught:
                use()
            assert "\n" not in str(caught.value)
    finally:
        loading.native.cache_clear()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend: expected one of cpu, sycl, got 'xpu'"):
        xopt.Config(backend="xpu")


needs_sycl = pytest.mark.skipif(
    not sycl.available(), reason="NOT RUN: kernels on SYCL devices, whose runtime is not installed (make xpu)"
)


# ---- The cache on disk -----------------------------------------------------------------------------------------------


def in_other_thread(function: Callable[[], T]) -> T:
    """In a thread that has no stream yet, and so opens one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def norm_in_fresh_stream() -> tuple[torch.Tensor, sycl.Builds]:
    def run() -> tuple[torch.Tensor, sycl.Builds]:
        with torch.no_grad(), sycl.device("cpu") as device:
            return torch.ops.xopt.rms_norm(torch.arange(12.0).view(3, 4))[0], device.builds()

    return in_other_thread(run)


def counts(builds: sycl.Builds) -> tuple[int, int, int]:
    return builds.compiled, builds.read, builds.rejected


@needs_sycl
def test_kernels_are_kept_and_damaged_ones_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, builds = norm_in_fresh_stream()
    assert counts(builds) == (1, 0, 0)
    again, builds = norm_in_fresh_stream()
    assert counts(builds) == (0, 1, 0)
    assert torch.equal(first, again)
    (kept,) = (tmp_path / "xopt" / "sycl").iterdir()
    whole = kept.read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) - 100] ^= 1
    other_key = bytearray(whole)
    other_key[40] ^= 1
    for content in (whole[:-1], bytes(damaged), bytes(other_key)):
        kept.write_bytes(content)
        again, builds = norm_in_fresh_stream()
        assert counts(builds) == (1, 0, 1)
        assert torch.equal(first, again)
        assert kept.read_bytes()[:32] == whole[:32]


@needs_sycl
def test_where_nothing_can_be_kept_kernels_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    _, builds = norm_in_fresh_stream()
    assert counts(builds) == (1, 0, 0)


# ---- Streams ---------------------------------------------------------------------------------------------------------


def linear_calls() -> int:
    return sycl.calls()["gemm f32"]


@needs_sycl
@torch.no_grad()
def test_a_chain_waits_only_at_its_end() -> None:
    weight = torch.ops.xopt.linear_pack(torch.randn(48, 48) / 7, dtype=torch.float32)
    x = torch.randn(20, 48)

    def chain() -> list[torch.Tensor]:
        kept = [x]
        for _ in range(6):
            kept.append(torch.ops.xopt.linear_norm(kept[-1], weight, 48, None, kept[-1])[0])
        return kept

    with sycl.device("cpu") as device:
        before = device.synchronizations()
        expected = chain()
        assert device.synchronizations() - before >= 6
    with sycl.device("cpu", asynchronous=True) as device:
        first = chain()
        device.synchronize()  # scratch memory has its size now
        before = device.synchronizations()
        got = chain()
        assert device.synchronizations() == before
        device.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected * 2, first + got, strict=True))


@needs_sycl
@torch.no_grad()
def test_what_an_operator_had_on_its_stack_outlives_it() -> None:
    """The places of an interpolation, which kernels read after the operators have returned, without a wait between."""
    images = [last(torch.randn(1, 5, size, size + 1)) for size in range(2, 40)]
    resized = [list(reversed(image.shape[2:])) for image in images]
    expected = [
        torch.nn.functional.interpolate(image.double(), size, mode="bilinear")
        for image, size in zip(images, resized, strict=True)
    ]
    with sycl.device("cpu", asynchronous=True) as device:
        before = device.synchronizations()
        pairs = zip(images, resized, strict=True)
        got = [torch.ops.xopt.upsample(image, size, "linear") for image, size in pairs]
        assert device.synchronizations() == before
        device.synchronize()
    assert all(torch.allclose(a.double(), b, atol=1e-5) for a, b in zip(got, expected, strict=True))


@needs_sycl
@torch.no_grad()
def test_tensors_may_be_dropped_before_their_kernels_have_run() -> None:
    """Inputs, results and copies that operators make for themselves, all of sizes that are given out again at once."""
    weight = torch.ops.xopt.linear_pack(torch.eye(256), dtype=torch.float32)
    with sycl.device("cpu", asynchronous=True) as device:
        for _ in range(3):
            totals = []
            for value in range(8):
                x = torch.full((256, 512), float(value))
                for _ in range(10):
                    x = torch.ops.xopt.linear(x[:, :256], weight, 256)
                totals.append(x)
                torch.full((256, 256), -1.0)  # what was freed too early is overwritten
            device.synchronize()
            assert [float(total.min()) for total in totals] == [float(total.max()) for total in totals] == [*range(8)]


@needs_sycl
@torch.no_grad()
def test_what_kernels_have_used_is_dropped_in_the_end() -> None:
    weight = torch.ops.xopt.linear_pack(torch.eye(1024), dtype=torch.float32)
    before = _C.output_statistics()[0]
    with sycl.device("cpu", asynchronous=True) as device:
        x = torch.ones(1024, 1024)
        for _ in range(50):
            x = torch.ops.xopt.linear(x, weight, 1024)
        device.synchronize()
        assert _C.output_statistics()[0] - before == x.nbytes
        assert torch.equal(x, torch.ones(1024, 1024))


@needs_sycl
@torch.no_grad()
def test_an_operator_that_copies_or_has_no_kernel_waits() -> None:
    weight = torch.ops.xopt.linear_pack(torch.eye(48), dtype=torch.float32)
    kernel = torch.ops.xopt.conv_pack(torch.eye(20).view(20, 20, 1, 1), 1, dtype=torch.float32)
    x = torch.randn(1, 20, 20, 48)
    with sycl.device("cpu", asynchronous=True) as device:
        image = torch.ops.xopt.linear(x, weight, 48)  # its channels are not last
        geometry = {"stride": [1, 1], "padding": [0] * 4, "dilation": [1, 1]}
        copied = torch.ops.xopt.conv(image, kernel, [20, 20, 1, 1], **geometry)
        device.synchronize()
    assert torch.equal(copied, x)


@needs_sycl
@torch.no_grad()
def test_only_the_thread_within_is_concerned() -> None:
    weight = torch.ops.xopt.linear_pack(torch.eye(4), dtype=torch.float32)
    x = torch.ones(2, 4)
    inside, done = threading.Event(), threading.Event()

    def stay_within() -> None:
        with sycl.device("cpu"):
            inside.set()
            done.wait()

    thread = threading.Thread(target=stay_within)
    thread.start()
    inside.wait()
    before = linear_calls()
    torch.ops.xopt.linear(x, weight, 4)
    assert linear_calls() == before
    done.set()
    thread.join()
    with sycl.device("cpu"):
        with sycl.device("cpu", asynchronous=True) as inner:
            kept = torch.ops.xopt.linear(x, weight, 4)
            inner.synchronize()
            assert torch.equal(kept, x)
        torch.ops.xopt.linear(x, weight, 4)
    torch.ops.xopt.linear(x, weight, 4)
    assert linear_calls() == before + 2


# ---- What goes wrong ------------------------------------------------------------------------------------------------


@needs_sycl
@torch.no_grad()
def test_a_kernel_that_does_not_build_brings_the_compilers_words() -> None:
    weight = torch.ops.xopt.linear_pack(torch.eye(4), dtype=torch.float32)
    with sycl.device("cpu", tile=(8, 16, 48)), pytest.raises(RuntimeError, match="did not build") as caught:
        torch.ops.xopt.linear(torch.ones(2, 4), weight, 4)
    assert "-DXOPT_TK=24" in str(caught.value)
    assert "kPackedK % kTileK == 0" in str(caught.value)


@needs_sycl
def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(RuntimeError, match="there is no SYCL device '77'; there are: 0: "):
        sycl.device("77")


@needs_sycl
@pytest.mark.parametrize(
    "environment", [{"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, {"OCL_ICD_FILENAMES": "/no/such/driver.so"}]
)
def test_without_any_device_one_line_says_so(environment: dict[str, str]) -> None:
    """None that is allowed, or a driver whose path leads nowhere, which is the user's own word."""
    program = """
        import torch, xopt
        model = xopt.optimize(torch.nn.Linear(4, 4).eval(), config=xopt.Config(backend="sycl"))
        for use in (lambda: xopt.sycl.device("cpu"), lambda: model(torch.ones(1, 4))):
            try:
                use()
            except RuntimeError as error:
                print(error)
    """
    lines = fresh_process.output_of(program, **environment).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("xopt.sycl: there is no SYCL device 'cpu'; there are: none at all")


@needs_sycl
def test_a_driver_registered_under_a_broken_path_is_worked_around_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "intel64_cpu.icd").write_text("/the/path/of/another/machine/libintelocl.so")
    monkeypatch.setattr(loading, "_SYSTEM_DRIVERS", tmp_path)
    loading.opencl_driver.cache_clear()
    try:
        with caplog.at_level("INFO", logger="xopt"):
            assert Path(loading.opencl_driver()).name == "libintelocl.so"
            assert loading.opencl_driver() == loading.opencl_driver()
        said = [record.message for record in caplog.records if "OpenCL driver" in record.message]
        assert said == [f"sycl: the OpenCL driver for CPUs is taken from {loading.opencl_driver()}"]
        (tmp_path / "intel64_cpu.icd").write_text(loading.opencl_driver())
        loading.opencl_driver.cache_clear()
        assert loading.opencl_driver() == ""  # the system's own is left in charge
    finally:
        loading.opencl_driver.cache_clear()


@needs_sycl
def test_memory_that_a_device_lacks_is_named() -> None:
    """The driver is told that it may hand out a megabyte at once; a norm after a product keeps four."""
    program = """
        import torch, xopt
        weight = torch.ops.xopt.linear_pack(torch.eye(256), dtype=torch.float32)
        x = torch.ones(4096, 256)
        with torch.no_grad(), xopt.sycl.device("cpu"):
            try:
                torch.ops.xopt.linear_norm(x, weight, 256)
            except RuntimeError as error:
                print(error)
            print(torch.equal(torch.ops.xopt.linear(x, weight, 256), x))
    """
    said, next_call = fresh_process.output_of(program, CL_CONFIG_CPU_FORCE_MAX_MEM_ALLOC_SIZE="1MB").splitlines()
    assert said.startswith("xopt.sycl: ")
    assert said.endswith(" has no 4194304 bytes of memory left for what an operator keeps meanwhile")
    assert next_call == "True"


@needs_sycl
@torch.no_grad()
def test_a_device_without_matrix_units_computes_on_its_vectors() -> None:
    found = find("cpu")
    if found.matrix_shapes:
        pytest.skip("NOT RUN: products without matrix units, which this device has; tests of other CPUs run them")
    weight = torch.randn(33, 40)
    packed = torch.ops.xopt.linear_pack(weight, dtype=torch.float32)
    x = torch.randn(5, 40)
    with sycl.device("cpu") as device:
        assert not any(device.tile(dtype).matrix for dtype in ("bf16", "f16", "f32", "s8", "u8"))
        assert torch.allclose(torch.ops.xopt.linear(x, packed, 33), x @ weight.t(), atol=1e-4)


@needs_sycl
def test_the_bench_tells_what_building_costs_cold_and_cached(capsys: pytest.CaptureFixture[str]) -> None:
    print_builds("cpu")
    cold, cached = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"the 3 programs of BERT compiled: \d+\.\d+ s", cold)
    assert re.fullmatch(r"the 3 programs of BERT read from disk: \d+\.\d+ s", cached)


@needs_sycl
def test_a_process_forked_from_one_that_uses_sycl_is_told() -> None:
    program = """
        import os, xopt
        xopt.sycl.devices()
        child = os.fork()
        if child == 0:
            try:
                xopt.sycl.devices()
            except RuntimeError as error:
                os._exit(0 if "before this process was forked" in str(error) else 1)
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert fresh_process.output_of(program) == "0"
