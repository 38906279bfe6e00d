"""Profiles: that times add up, operations are counted right, and nothing is left behind. No test knows how fast the
machine is."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.flop_counter import FlopCounterMode

import xopt
from tests import fresh_process
from xopt import _C
from xopt.profiling import Profile, roof_cache, session
from xopt.profiling.category import CATEGORIES, OVERHEAD
from xopt.profiling.events import Op, TensorArgument
from xopt.profiling.timeline import Piece, clipped, covered, deal_out
from xopt.profiling.work import bound_arguments
from xopt.roofs import KINDS, Roof, Roofs
from xopt.runtime import CorePool, MultiStream

_SMALL: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
Made = tuple[nn.Module, dict[str, Any]]


def bert(**options: Any) -> Made:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**_SMALL, **options)).eval()
    return model, {"input_ids": torch.randint(0, 1000, (2, 32))}


def vit() -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**_SMALL, image_size=32, patch_size=8)
    return transformers.ViTModel(config).eval(), {"pixel_values": torch.randn(1, 3, 32, 32)}


def resnet() -> Made:
    transformers = pytest.importorskip("transformers")
    return transformers.ResNetModel(transformers.ResNetConfig()).eval(), {"pixel_values": torch.randn(1, 3, 64, 64)}


def unet() -> Made:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    sample, states = torch.randn(1, 4, 8, 8), torch.randn(1, 7, 32)
    return model, {"sample": sample, "timestep": 3, "encoder_hidden_states": states}


MODELS: dict[str, Callable[[], Made]] = {"bert": bert, "vit": vit, "resnet": resnet, "unet": unet}


@functools.cache
def profiled(name: str, optimized: bool) -> tuple[Profile, int]:
    """With what flop_counter counts."""
    model, inputs = MODELS[name]()
    if optimized:
        model = xopt.optimize(model, dtype=torch.bfloat16)
    taken = xopt.profile(model, **inputs, steps=2, warmup=2, roofs=False)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return taken, counter.get_total_flops()


def attention_on_cpu(taken: Profile) -> float:
    """Operations of the kernel that flop_counter has no formula for, a step."""
    kernels = [kernel for kernel in taken.kernels if kernel.operator == "aten::scaled_dot_product_attention"]
    return sum(kernel.flop * kernel.calls for kernel in kernels) / taken.steps


@pytest.mark.parametrize("optimized", [False, True], ids=["plain", "optimized"])
@pytest.mark.parametrize("name", MODELS)
def test_times_and_operations_add_up(name: str, optimized: bool) -> None:
    taken, counted = profiled(name, optimized)
    assert taken.steps == len(taken.step_seconds) == 2
    total = sum(category.seconds for category in taken.categories.values())
    assert total == pytest.approx(taken.wall_seconds)
    assert total == pytest.approx(sum(kernel.seconds for kernel in taken.kernels))
    assert set(taken.categories) <= set(CATEGORIES)
    assert "other" not in taken.categories
    assert taken.flop - attention_on_cpu(taken) == counted > 0
    ours = {kernel.operator for kernel in taken.kernels if kernel.operator.startswith("xopt::")}
    assert bool(ours) == optimized


def test_names_say_what_is_fused_and_which_level_ran() -> None:
    taken, _ = profiled("bert", True)
    names = {kernel.name: kernel for kernel in taken.kernels}
    level = _C.find_kernel("gemm", "bf16")
    up = names[f"linear[bf16,{level}]+bias+gelu_erf 64x128x64"]
    assert (up.calls, up.category, up.module) == (4, "gemm", "encoder.layer.*.intermediate.dense")
    assert up.flop == 2 * 64 * 128 * 64
    down = names[f"linear_norm[bf16,{level}]+bias+residual+layer_norm 64x64x128"]
    assert down.module == "encoder.layer.*.output.dense"
    packed = 64 + 2 * 4 * 2048  # header; panels of 32 columns, of which 32 terms take 2048 bytes
    activations, vectors = 64 * (128 + 64 + 64) * 2, 3 * 64 * 4
    assert down.bytes == packed + activations + vectors


def test_each_operator_that_computes_says_what_it_costs() -> None:
    operators = {name.removeprefix("xopt::") for name in torch._C._dispatch_get_all_op_names() if "xopt::" in name}
    computing = {name.partition(".")[0] for name in operators if not re.search(r"_(un)?pack(_|$)", name)}
    assert computing == set(xopt.ops.costs.COSTS)


@pytest.mark.parametrize("stride", [[1, 1], None])
def test_a_call_whose_arguments_torch_has_lost_is_of_unknown_size(stride: list[int] | None) -> None:
    tensors = [TensorArgument(shape, "bf16", ()) for shape in ((1, 32, 16, 16), (36928,))]
    arguments = [*tensors, [64, 32, 3, 3], None, stride, [0, 0, 0, 0], [1, 1], 1]
    bound = bound_arguments(Op("xopt::conv", "", 0, 1, 1, arguments), (), lambda tensor: tensor.shape)
    assert (bound is None) == (stride is None)


def test_work_that_xopt_could_have_taken_is_a_fallback() -> None:
    config = xopt.Config(fuse_attention=False)
    model, inputs = bert()
    taken = xopt.profile(xopt.optimize(model, config=config), **inputs, steps=1, warmup=1, roofs=False)
    assert any(kernel.category == "fallback" and "attention" in kernel.operator for kernel in taken.kernels)
    plain, _ = profiled("bert", False)
    assert "fallback" not in plain.categories


def test_an_optimized_model_stays_fused_and_nothing_is_left_behind() -> None:
    model, inputs = bert()
    model = xopt.optimize(model)
    taken = xopt.profile(model, **inputs, steps=1, warmup=1, roofs=False)
    assert any("+gelu" in kernel.name for kernel in taken.kernels)
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    _C.start_trace()
    _C.stop_trace()
    with torch.inference_mode():
        model(**inputs)
    assert not _C.trace_entries()


def test_a_profile_goes_to_json_and_back() -> None:
    taken, _ = profiled("bert", True)
    again = Profile.from_json(taken.to_json())
    assert again == taken
    assert str(again) == str(taken)
    with pytest.raises(ValueError, match="expected a profile"):
        Profile.from_json("{}")


def test_the_trace_holds_each_piece(tmp_path: pathlib.Path) -> None:
    taken, _ = profiled("bert", True)
    taken.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    pieces = [event for event in events if event["ph"] == "X" and event["cat"] != "step"]
    assert len(pieces) == len(taken.timeline)
    steps = [event for event in events if event["ph"] == "X" and event["cat"] == "step"]
    assert [step["dur"] for step in steps] == pytest.approx([seconds * 1e6 for seconds in taken.step_seconds])
    assert all(event["ts"] + event["dur"] <= steps[-1]["ts"] + steps[-1]["dur"] * 1.02 for event in pieces)


def test_memory_of_a_step_is_counted() -> None:
    taken = xopt.profile(torch.relu, torch.randn(1000), steps=1, warmup=0, roofs=False)
    assert (taken.memory.allocations, taken.memory.allocated_bytes) == (1, 4000)


# ---- The context -----------------------------------------------------------------------------------------------------


def test_a_block_is_one_step_and_finds_its_modules() -> None:
    model, inputs = bert()
    with xopt.profiler(roofs=False) as taken, torch.no_grad():
        assert "nothing was profiled yet" in str(taken)
        model(**inputs)
    assert taken.steps == 1
    assert taken.title == "BertModel"
    assert any(kernel.module == "BertModel.encoder.layer.*.output.dense" for kernel in taken.kernels)
    assert taken.modules["BertModel.encoder"].kind == "BertEncoder"


def test_an_exception_passes_and_the_profile_so_far_is_kept() -> None:
    def half_of_it() -> None:
        torch.ones(64, 64) @ torch.ones(64, 64)
        _ = 1 // 0

    started = xopt.profiler(roofs=False)
    with pytest.raises(ZeroDivisionError), started:
        half_of_it()
    taken = started.profile
    assert taken.error == "ZeroDivisionError: integer division or modulo by zero"
    assert any(kernel.category == "gemm" and kernel.flop == 2 * 64**3 for kernel in taken.kernels)
    assert not hooks._global_forward_hooks


def test_a_profile_inside_another_is_refused_and_spoils_nothing() -> None:
    with xopt.profiler(roofs=False) as taken:
        with pytest.raises(RuntimeError, match="no other profile"):
            xopt.profile(torch.relu, torch.ones(1), roofs=False)
        torch.ones(64, 64) @ torch.ones(64, 64)
    assert any(kernel.category == "gemm" for kernel in taken.kernels)
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="no other profile"), xopt.profiler(roofs=False):
        pass
    assert xopt.profile(torch.relu, torch.ones(1), steps=1, roofs=False).steps == 1


def test_a_step_takes_as_long_as_a_clock_beside_it_says() -> None:
    inside: list[float] = []

    def called(image: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        time.sleep(0.02)
        result = image @ image
        inside.append(time.perf_counter() - start)
        return result

    start = time.perf_counter()
    taken = xopt.profile(called, torch.randn(64, 64), steps=3, warmup=0, roofs=False)
    outside = time.perf_counter() - start
    assert sum(inside) < outside
    assert all(seconds > 0.019 for seconds in taken.step_seconds)
    # Of the calls before and after, which the profile does not take, none belongs to a step.
    assert 0.99 * sum(inside[2:5]) < taken.wall_seconds < outside - 0.99 * sum(inside[:2] + inside[5:])
    assert taken.categories[OVERHEAD].seconds > 3 * 0.019


def test_streams_run_side_by_side_and_still_add_up() -> None:
    pool = CorePool()
    model = xopt.optimize(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval())
    streams = MultiStream(model, [pool, pool])
    taken = xopt.profile(streams, torch.randn(64, 256), steps=2, warmup=1, roofs=False)
    assert len({row[3] for row in taken.timeline if row[5] == "gemm"}) == 2
    assert sum(category.seconds for category in taken.categories.values()) == pytest.approx(taken.wall_seconds)
    products = [kernel for kernel in taken.kernels if kernel.category == "gemm"]
    assert sum(kernel.calls for kernel in products) == 2 * 2 * 2
    assert all(kernel.module in ("model.*",) for kernel in products)


def test_threads_of_a_region_are_watched() -> None:
    if torch.get_num_threads() < 2:
        pytest.skip("NOT RUN: torch uses one thread")
    model = xopt.optimize(nn.Sequential(nn.Linear(512, 512)).eval())
    taken = xopt.profile(model, torch.randn(256, 512), steps=2, warmup=1, roofs=False)
    kernel = next(kernel for kernel in taken.kernels if kernel.category == "gemm")
    assert kernel.thread_efficiency is not None
    assert 0 < kernel.thread_efficiency <= 1
    assert taken.thread_efficiency == pytest.approx(kernel.thread_efficiency)


def test_compiled_kernels_have_names() -> None:
    program = """
        import torch, xopt
        from torch import nn

        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).eval()
        taken = xopt.profile(torch.compile(model), torch.randn(32, 64), steps=2, warmup=2, roofs=False)
        loops = [kernel for kernel in taken.kernels if "cpp_fused" in kernel.name]
        assert loops, [kernel.name for kernel in taken.kernels]
        assert {kernel.category for kernel in loops} == {"norm"}, loops
        total = sum(category.seconds for category in taken.categories.values())
        assert abs(total / taken.wall_seconds - 1) < 1e-6
        assert taken.flop == 2 * 32 * 64 * 64, taken.flop
        print("fine")
    """
    assert fresh_process.output_of(program).endswith("fine")


def test_the_marks_of_the_last_warm_up_are_those_of_the_steps() -> None:
    """Torch 2.11 compiles anew for each number that a hook of all modules gets."""
    seen: list[tuple[int, ...]] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(hooks._global_forward_hooks))
            return x + 1

    xopt.profile(Looks(), torch.ones(2), steps=2, warmup=2, roofs=False)
    marked = [each for each in seen if each]
    assert len(marked) == 3
    assert len(set(marked)) == 1
    assert not hooks._global_forward_hooks


def test_a_compiled_bert_is_profiled() -> None:
    pytest.importorskip("transformers")
    program = """
        import torch, xopt
        from tests.test_profiling import attention_on_cpu, bert

        model, inputs = bert()
        plain = xopt.profile(model, **inputs, steps=1, warmup=1, roofs=False)
        taken = xopt.profile(torch.compile(model), **inputs, steps=2, warmup=2, roofs=False)
        total = sum(category.seconds for category in taken.categories.values())
        assert abs(total / taken.wall_seconds - 1) < 1e-6, (total, taken.wall_seconds)
        assert taken.flop == plain.flop > 0, (taken.flop, plain.flop)
        assert {"gemm", "norm", "attention"} <= set(taken.categories), taken.categories
        assert any("cpp_fused" in kernel.name and "layer_norm" in kernel.name for kernel in taken.kernels)
        print("fine")
    """
    assert fresh_process.output_of(program).endswith("fine")


def test_a_graph_that_was_compiled_before_is_one_row() -> None:
    program = """
        import torch, xopt
        from torch import nn

        before = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).eval())
        rows = torch.randn(32, 64)
        with torch.inference_mode():
            before(rows)
        taken = xopt.profile(before, rows, steps=2, warmup=1, roofs=False)
        loops = [kernel for kernel in taken.kernels if kernel.name == "loops of a compiled graph"]
        assert [(kernel.category, kernel.calls) for kernel in loops] == [("pointwise", 2)], taken.kernels
        assert taken.flop == 2 * 32 * 64 * 64, taken.flop
        assert any("are not told apart" in finding for finding in taken.findings)
        print("fine")
    """
    assert fresh_process.output_of(program).endswith("fine")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"steps": 0}, "steps: expected a whole number of at least 1, got 0"), ({"warmup": -1}, "warmup: expected")],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        xopt.profile(torch.relu, torch.ones(1), **arguments)


def test_importing_xopt_does_not_import_the_profiler() -> None:
    program = """
        import sys, xopt
        assert not any(name.startswith("xopt.profiling") for name in sys.modules)
        assert callable(xopt.profile) and callable(xopt.profiler)
    """
    fresh_process.output_of(program)


# ---- Time ------------------------------------------------------------------------------------------------------------


def test_each_moment_of_a_step_is_dealt_out_once() -> None:
    one, two = object(), object()
    pieces = [Piece(0, 4, 1, one), Piece(2, 8, 2, two), Piece(9, 20, 1, one)]
    shares, idle = deal_out(pieces, [(1, 10), (12, 14)])
    assert shares == {id(one): 1 + 1 + 1 + 2, id(two): 1 + 4}
    assert idle == 1
    assert sum(shares.values()) + idle == 11
    inside = [(step, piece.start, piece.end) for step, piece in clipped(pieces, [(1, 10), (12, 14)])]
    assert inside == [(0, 1, 4), (0, 2, 8), (0, 9, 10), (1, 12, 14)]
    assert covered([(0, 4), (2, 8), (9, 20)]) == 19


# ---- Roofs -----------------------------------------------------------------------------------------------------------


def test_roofs_are_measured_once_and_again_on_demand(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[int] = []

    def measure(threads: int) -> Roofs:
        measured.append(threads)
        return Roofs(threads, {kind: Roof(1e9 * len(measured), "made up") for kind in KINDS})

    monkeypatch.setattr(roof_cache, "measure_roofs", measure)
    monkeypatch.setattr(roof_cache, "_COPY_BYTES", 1 << 16)
    first = roof_cache.roofs_of_machine(1)
    assert (measured, first.read) == ([1, 1], 2e9)  # the better of two
    assert first.by_kind[roof_cache.COPY].per_second > 0
    assert roof_cache.roofs_of_machine(1) == first
    assert len(measured) == 2
    assert roof_cache.roofs_of_machine(2) != first
    assert roof_cache.roofs_of_machine(1, remeasure=True).read > first.read
    assert roof_cache.roofs_of_machine(1).read > first.read
    for file in roof_cache.cache_folder().iterdir():
        file.write_text("{")  # a file that is damaged is measured anew
    count = len(measured)
    roof_cache.roofs_of_machine(1)
    assert len(measured) == count + 2


def test_the_first_profiles_raise_roofs_that_a_busy_neighbour_lowered(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(roof_cache, "_SECONDS_BETWEEN", -1.0)
    figures = iter((1e9, 3e9, 2e9, 2e9))
    key: dict[str, object] = {"cpu": "made up"}

    def measure() -> Roofs:
        return Roofs(1, dict.fromkeys(KINDS, Roof(next(figures), "made up")))

    def found() -> float:
        return roof_cache.cached_roofs(key, measure, set(KINDS)).read

    assert [found() for _ in range(6)] == [1e9, 3e9, 3e9, 3e9, 3e9, 3e9]  # four measurements, and no more
    assert next(figures, None) is None


def test_a_roof_that_is_beaten_is_measured_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(roof_cache, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(session, "_measured_again", set())
    measured: list[float] = []

    def measure(threads: int) -> Roofs:
        measured.append(1e6 if len(measured) < 2 else 1e15)  # the first time on a busy machine: two in turns
        return Roofs(threads, {kind: Roof(measured[-1], "made up") for kind in KINDS})

    monkeypatch.setattr(roof_cache, "measure_roofs", measure)
    model = nn.Sequential(nn.Linear(256, 256)).eval()
    for times in (4, 4):  # and then no more
        taken = xopt.profile(model, torch.randn(128, 256), steps=1, warmup=0)
        kernel = next(kernel for kernel in taken.kernels if kernel.category == "gemm")
        assert len(measured) == times
        assert taken.roofs["f32"] == 1e15
        assert kernel.share_of_roof is not None
        assert kernel.share_of_roof < 1
        assert roof_cache.roofs_of_machine(taken.threads).by_kind["f32"].per_second == 1e15


def test_kernels_are_compared_with_the_roof_of_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"f32": 1e9, "bf16": 4e9, "int8": 8e9, "read": 1e12, "copy": 1e12}
    made_up = Roofs(1, {kind: Roof(rate, "made up") for kind, rate in rates.items()})
    monkeypatch.setattr(session, "roofs_of_machine", lambda threads: made_up)
    monkeypatch.setattr(session, "raised_roofs", lambda threads, known: known)
    model = nn.Linear(256, 256).eval()
    for dtype, peak in ((torch.float32, 1e9), (torch.bfloat16, 4e9)):
        optimized = xopt.optimize(model, dtype=dtype, inplace=False)
        taken = xopt.profile(nn.Sequential(optimized), torch.randn(64, 256), steps=1, warmup=1)
        kernel = next(kernel for kernel in taken.kernels if kernel.category == "gemm")
        assert kernel.share_of_roof == pytest.approx(kernel.flop_per_second / peak)
        assert kernel.bound == "compute"


# ---- Findings --------------------------------------------------------------------------------------------------------


def test_layout_changes_are_found_and_named() -> None:
    class Bouncing(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                image = image.contiguous(memory_format=torch.channels_last).contiguous()
            return image

    taken = xopt.profile(nn.Sequential(Bouncing()), torch.randn(4, 16, 64, 64), steps=2, warmup=1, roofs=False)
    finding = next(finding for finding in taken.findings if "layout changes" in finding)
    assert "around `*`" in finding
    assert "channels_last would remove them" in finding
