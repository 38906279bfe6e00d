"""Kernels of other devices in profiles, from events as torch's profiler would record them. No device is needed here:
tests/test_profile_cuda.py asks a real one."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from xopt.profiling import Profile, device_roofs, roof_cache, session
from xopt.profiling.calls import calls_and_pieces
from xopt.profiling.category import device_category
from xopt.profiling.devices import compare_with_roofs, devices_of
from xopt.profiling.events import DeviceKernel, Op, TensorArgument, read_events
from xopt.profiling.module_marks import STEP
from xopt.profiling.result import Device
from xopt.roofs import Roof, Roofs

US = 1000  # nanoseconds


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel as kineto tells of it, with the methods that the profiler asks for."""

    label: str
    first: int
    last: int
    launcher: int
    annotation: bool = False
    kind: str = "DeviceType.CUDA"
    index: int = 0

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.first

    def end_ns(self) -> int:
        return self.last

    def duration_ns(self) -> int:
        return self.last - self.first

    def linked_correlation_id(self) -> int:
        return self.launcher

    def correlation_id(self) -> int:
        return 1  # the runtime's own number, which is also that of an operator

    def device_type(self) -> str:
        return self.kind

    def device_index(self) -> int:
        return self.index

    def device_resource_id(self) -> int:
        return 7

    def is_user_annotation(self) -> bool:
        return self.annotation


class Results:
    """What torch recorded on the CPU, with kernels of a device put in."""

    def __init__(self, recorded: Any, kernels: Sequence[DeviceEvent]) -> None:
        self._recorded = recorded
        self._kernels = kernels

    def events(self) -> list[Any]:
        return [*self._recorded.events(), *self._kernels]

    def experimental_event_tree(self) -> Any:
        return self._recorded.experimental_event_tree()


def number_of(recorded: Any, name: str) -> int:
    return next(int(event.correlation_id()) for event in recorded.events() if event.name() == name)


def test_kernels_are_those_of_what_launched_them(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("@triton.jit\ndef triton_poi_fused_gelu_0(in_out_ptr0, in_ptr0, xnumel):\n    pass\n")
    rows, weight = torch.randn(64, 256), torch.randn(256, 128)
    region: Any = torch._C._profiler._RecordFunctionFast
    with profile(record_shapes=True) as recorded, record_function(STEP):
        torch.mm(rows, weight)
        with region("triton_poi_fused_gelu_0", (rows, rows, 3), {"kernel_file": str(source)}):
            pass
    results = recorded.profiler.kineto_results
    product, loop = number_of(results, "aten::mm"), number_of(results, "triton_poi_fused_gelu_0")
    kernels = [
        DeviceEvent("nvjet_tst_128x64", 0, 30 * US, product),
        DeviceEvent("splitKreduce_kernel", 31 * US, 33 * US, product),
        DeviceEvent("triton_poi_fused_gelu_0", 40 * US, 50 * US, loop),
        DeviceEvent("a region", 0, 50 * US, product, annotation=True),
        DeviceEvent("cudaLaunchKernel", 0, 1 * US, product, kind="DeviceType.CPU"),
    ]
    events = read_events(Results(results, kernels))
    assert [kernel.op.name if kernel.op else None for kernel in events.device] == [
        *("aten::mm", "aten::mm", "triton_poi_fused_gelu_0")
    ]
    device = devices_of(events.device, events.roots)["cuda:0"]
    by_name = {kernel.name.partition(" <")[0]: kernel for kernel in device.kernels}
    nvjet, reduction = by_name["nvjet_tst_128x64"], by_name["splitKreduce_kernel"]
    assert nvjet.name == "nvjet_tst_128x64 < mm[f32] 64x128x256"
    assert (nvjet.flop, nvjet.bytes) == (2 * 64 * 128 * 256, 4 * (64 * 256 + 256 * 128 + 64 * 128))
    assert nvjet.arguments["mat2"]["shape"] == [256, 128]
    assert (reduction.flop, reduction.bytes) == (0, 0)  # the longest of an operator's kernels has done its work
    fused = by_name["triton_poi_fused_gelu_0"]
    assert fused.bytes == 3 * rows.nbytes  # what is updated is read and written
    assert fused.bytes_per_second == pytest.approx(3 * rows.nbytes / 10e-6)
    assert device.busy_seconds == pytest.approx(42e-6)
    assert device.kernel_seconds == pytest.approx(42e-6)
    assert {name: entry.calls for name, entry in device.categories.items()} == {"gemm": 2, "pointwise": 1}


def test_with_a_device_in_use_arguments_of_compiled_kernels_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_devices_in_use", lambda: [torch.cpu])
    rows, region = torch.ones(4, 8), torch._C._profiler._RecordFunctionFast
    taking: Any = session.profiler(roofs=False)
    with taking, region("triton_poi_fused_0", (rows, 3), {"kernel_file": "a file"}):
        pass
    events = read_events(taking._kineto.profiler.kineto_results)
    found = [op for op in events.roots if op.name == "triton_poi_fused_0"]
    assert [(op.arguments[0].shape, op.notes["kernel_file"]) for op in found] == [((4, 8), "a file")]


def test_numbers_of_runtime_calls_are_not_taken_for_operators() -> None:
    with profile(record_shapes=True) as recorded, record_function(STEP):
        torch.relu(torch.ones(8))
    results = recorded.profiler.kineto_results
    launch = DeviceEvent("cudaLaunchKernel", 0, US, number_of(results, "aten::relu"), kind="DeviceType.CPU")
    names = [op.name for op in read_events(Results(results, [launch])).roots]
    assert names == [op.name for op in read_events(results).roots]
    assert {op.thread for op in read_events(Results(results, [launch])).roots} == {
        op.thread for op in read_events(results).roots
    }


def test_what_launches_kernels_is_overhead_of_the_cpu_and_owns_what_it_calls() -> None:
    image, weight = torch.randn(1, 8, 8, 8), torch.randn(8, 8, 3, 3)
    with profile(record_shapes=True) as recorded, record_function(STEP):
        torch.convolution(image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    results = recorded.profiler.kineto_results
    names = {event.name() for event in results.events()}
    inner = next(name for name in ("aten::mkldnn_convolution", "aten::_slow_conv2d_forward") if name in names)
    events = read_events(Results(results, [DeviceEvent("cutlass_fprop", 0, US, number_of(results, inner))]))
    assert {call.category for call in calls_and_pieces(events.roots)[0]} <= {"framework overhead", "allocation"}
    (row,) = devices_of(events.device, events.roots)["cuda:0"].kernels
    assert row.operator == "aten::convolution"
    assert row.flop == 2 * 8 * 8 * 8 * 8 * 9
    assert row.category == "conv"


def kernel(name: str, start: int, end: int, op: Op | None = None, device: str = "cuda:0") -> DeviceKernel:
    return DeviceKernel(name, start * US, end * US, device, 7, op)


def op_of(name: str, *shapes: tuple[int, ...], dtype: str = "bf16", overload: str = "") -> Op:
    tensors = [TensorArgument(shape, dtype, tuple(torch.empty(shape, device="meta").stride())) for shape in shapes]
    return Op(name, overload, 0, 1, 1, list(tensors))


def test_a_device_is_busy_while_any_kernel_runs() -> None:
    found = devices_of(
        [
            kernel("triton_poi_fused_0", 0, 10),
            kernel("triton_poi_fused_0", 5, 20),
            kernel("nvjet_0", 30, 40, device="cuda:1"),
        ],
        [],
    )
    assert list(found) == ["cuda:0", "cuda:1"]
    assert found["cuda:0"].busy_seconds == pytest.approx(20e-6)
    assert found["cuda:0"].kernel_seconds == pytest.approx(25e-6)
    assert {name: entry.calls for name, entry in found["cuda:0"].categories.items()} == {"pointwise": 2}
    assert found["cuda:0"].categories["pointwise"].seconds == pytest.approx(25e-6)
    taken = Profile(steps=2, step_seconds=[1e-4, 1e-4], plain_step_seconds=[4e-5, 4e-5], devices=found)
    assert taken.device_busy_share("cuda:0") == pytest.approx(10e-6 / 4e-5)
    taken.plain_step_seconds = []
    assert taken.device_busy_share("cuda:0") == pytest.approx(10e-6 / 1e-4)


def test_a_device_that_holds_nothing_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's profiler starts the devices that there are: profiles of the CPU still see all threads."""

    class Device:
        def __init__(self, held: int) -> None:
            self.memory_allocated = lambda: held

    holding = Device(1)
    monkeypatch.setattr(session, "_devices", lambda: [Device(0), holding])
    assert session._devices_in_use() == [holding]


def test_kernels_are_compared_with_the_devices_roofs() -> None:
    product = op_of("aten::mm", (1024, 1024), (1024, 1024))
    added = op_of("triton_poi_fused_add_0", (1 << 20,), (1 << 20,), dtype="f32")
    found = devices_of([kernel("nvjet", 0, 10, product), kernel("triton_poi_fused_add_0", 20, 30, added)], [])
    roofs = Roofs(0, {"f32": Roof(1e12, ""), "bf16": Roof(4e14, ""), "read": Roof(1.5e12, "")})
    compare_with_roofs(found["cuda:0"], roofs)
    rows = {row.category: row for row in found["cuda:0"].kernels}
    assert rows["gemm"].share_of_roof == pytest.approx(2 * 1024**3 / 4e14 / 10e-6)
    assert rows["gemm"].bound == "compute"
    assert rows["pointwise"].share_of_roof == pytest.approx(2 * 4 * 2**20 / 1.5e12 / 10e-6)
    assert rows["pointwise"].bound == "memory"


def test_profiles_of_devices_go_to_json_and_back_and_show_themselves() -> None:
    launched_by = op_of("triton_red_fused_sum_0", (4096, 4096), (4096,))
    found = devices_of([kernel("triton_red_fused_sum_0", 0, 10, launched_by)], [])
    found["cuda:0"].name = "A GPU"
    found["cuda:0"].roofs = {"f32": 5e13, "bf16": 8e14, "copy": 3e12}
    taken = Profile(steps=1, step_seconds=[2e-5], plain_step_seconds=[2e-5], devices=found)
    assert Profile.from_json(taken.to_json()) == taken
    text = str(taken)
    assert "cuda:0 (A GPU): busy 50% of a step" in text
    assert "measured roofs: f32 50 TFLOP/s, bf16 800 TFLOP/s, copying 3000 GB/s" in text
    assert "triton_red_fused_sum_0" in text


def test_roofs_of_a_device_are_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device_roofs, "name_of_device", lambda device: "A GPU")
    measured = []

    def measure(device: str) -> Roofs:
        measured.append(device)
        return Roofs(0, dict.fromkeys(("f32", "bf16", "f16", "read", roof_cache.COPY), Roof(1e9, "made up")))

    monkeypatch.setattr(device_roofs, "measure_device", measure)
    first = device_roofs.roofs_of_device("cuda:0")
    assert device_roofs.roofs_of_device("cuda:0") == first
    assert measured == ["cuda:0"]
    device_roofs.roofs_of_device("cuda:0", remeasure=True)
    assert len(measured) == 2


def test_an_empty_device_has_no_rows() -> None:
    assert devices_of([], []) == {}
    assert Device("A GPU").kernel_seconds == 0


@pytest.mark.parametrize(
    ("name", "op", "category"),
    [
        ("triton_poi_fused_add_gelu_0", "", "pointwise"),
        ("triton_red_fused_mean_1", "", "reduction"),
        ("triton_per_fused_native_layer_norm_2", "", "persistent reduction"),
        ("triton_tem_fused_addmm_3", "", "gemm"),
        ("triton_tem_fused_convolution_4", "", "conv"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "aten::mm", "gemm"),
        ("nvjet_hsh_128x256", "aten::addmm", "gemm"),
        ("cutlass_80_wmma_tensorop_bf16", "aten::convolution", "conv"),
        ("void cudnn::ops::nchwToNhwcKernel<>", "aten::convolution", "reorder"),
        ("sm90_xmma_fprop_implicit_gemm_bf16", "aten::cudnn_convolution", "conv"),
        ("cudnn::implicit_convolve_sgemm", "aten::cudnn_convolution", "conv"),
        ("void pytorch_flash::flash_fwd_kernel", "", "attention"),
        ("Memcpy HtoD (Pageable -> Device)", "aten::copy_", "reorder"),
        ("void at::native::vectorized_elementwise_kernel<4>", "aten::relu", "pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "aten::mul", "pointwise"),
        ("void at::native::reduce_kernel<512>", "aten::sum", "reduction"),
    ],
)
def test_kernels_of_other_devices_have_categories(name: str, op: str, category: str) -> None:
    assert device_category(name, op) == category
