"""The kernels on SYCL devices: the families of the operators' own tests, run on the CPU's SYCL device.

Where the CPU has AMX, products run on it in the CPU's best tile and in that of XMX; elsewhere the same loops run on
vectors, and what that leaves unproven is said at the end of the run.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xopt
from tests.families import find_family
from tests.fresh_process import ROOT
from xopt import sycl
from xopt.sycl import loading

transformers = pytest.importorskip("transformers")

if not sycl.available():
    pytest.skip("NOT RUN: kernels on SYCL devices, whose runtime is not installed (make xpu)", allow_module_level=True)

XMX_TILE = (8, 16, 16)
AMX_TILE = (16, 16, 32)
CASES = 40
MOST_DEPTH = 512  # of attention, whose blocks lie in local memory


def run_family(name: str, count: int = CASES, dtype: str | None = None) -> None:
    """`dtype`: only cases that compute in it."""
    family = find_family(name)

    def is_meant(case: Any) -> bool:
        computed = getattr(case, "packed", getattr(case, "dtype", getattr(case, "input", None)))
        # Each dtype is a build of seconds, and fp16's tiles are proven by the linear layers.
        built_for_another = computed == "f16" and name in ("weight_only", "conv", "attention")
        return getattr(case, "depth", 0) <= MOST_DEPTH and dtype in (None, computed) and not built_for_another

    before = sum(sycl.calls().values())
    ran = family.run_all(filter(is_meant, family.cases(seed=77, count=count)))
    assert ran > count // 5
    assert sum(sycl.calls().values()) - before > ran // 2


LINEAR = ("linear", "linear_gated", "linear_norm", "qlinear", "weight_only")
IMAGES = ("conv", "batch_norm", "group_norm", "pool", "adaptive_pool", "upsample")
OTHERS = ("norm", "softmax", "rotary", "concat", "combine", "pointwise", "attention")


@pytest.mark.parametrize("name", [*LINEAR, *IMAGES, *OTHERS])
def test_operators_against_float64(name: str) -> None:
    with sycl.device("cpu"):
        run_family(name)


@pytest.mark.parametrize("name", ["linear", "weight_only", "attention"])
def test_other_tiles(name: str) -> None:
    """On AMX those of XMX, a GPU's matrix units; on vectors, whose tiles are as large as XMX's, those of AMX."""
    with sycl.device("cpu") as device:
        best = device.tile("bf16")
    other = AMX_TILE if (best.rows, best.columns, best.depth) == XMX_TILE else XMX_TILE
    with sycl.device("cpu", tile=other) as device:
        assert device.tile("bf16").matrix == best.matrix
        run_family(name, dtype="bf16")


def test_products_run_on_matrix_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine code that the driver makes has AMX's products, for bf16 and int8, in its own tile and in XMX's."""
    if not xopt.capabilities().features["amx_bf16"]:
        pytest.skip("NOT RUN: SYCL products on AMX (joint_matrix), which this CPU lacks; the plain tiles ran instead")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for tile, dtype in ((None, "bf16"), (XMX_TILE, "bf16"), (XMX_TILE, "s8")):
        with sycl.device("cpu", tile=tile) as device:
            assert device.tile(dtype).matrix, f"{dtype} in {device.tile(dtype)}"

    def run() -> None:
        with sycl.device("cpu", tile=XMX_TILE):
            run_family("linear", dtype="bf16", count=20)
            run_family("qlinear", count=20)

    in_other_thread(run)
    codes = [path.read_bytes() for path in (tmp_path / "xopt" / "sycl").iterdir()]
    assert any(has_vex_instruction(code, 0x5C, prefix=2) for code in codes), "no tdpbf16ps"
    assert any(has_vex_instruction(code, 0x5E, prefix=3) for code in codes), "no tdpbssd"


def test_code_for_matrix_units_is_made_without_them(tmp_path: Path) -> None:
    """What `make check-xmx` does for all kernels, GPUs and machine code, here for one to SPIR-V."""
    spec = importlib.util.spec_from_file_location("check_xmx", ROOT / ".ci" / "check_xmx.py")
    assert spec is not None
    assert spec.loader is not None
    check_xmx = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_xmx)
    builds = loading.native().gpu_builds(*XMX_TILE)
    source, options = next(build for build in builds if build[0] == "gemm.sycl")
    opcodes = check_xmx.opcodes(check_xmx.spirv_of(source, options, tmp_path).read_bytes())
    assert opcodes & check_xmx.MULTIPLY_ADDS


def has_vex_instruction(code: bytes, opcode: int, prefix: int) -> bool:
    """One of map 0F38 on registers, with 128 bits: all of AMX's products."""
    pattern = re.compile(b"\xc4[\xe2\xc2\x62\x42](.)" + re.escape(bytes([opcode])) + b"[\xc0-\xff]", re.DOTALL)
    return any(found[1][0] & 0x87 == prefix for found in pattern.finditer(code))


def in_other_thread(function: Callable[[], Any]) -> Any:
    """In a thread that has no stream yet, and so opens one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool, torch.no_grad():
        return pool.submit(function).result()


def test_depths_beyond_local_memory_are_named() -> None:
    query = torch.zeros(1, 1, 1, 4096)
    with (
        sycl.device("cpu"),
        pytest.raises(RuntimeError, match=r"query: depths of 4096 and 4096 take \d+ bytes of local"),
    ):
        torch.ops.xopt.attention(query, query, query)


# ---- Whole models --------------------------------------------------------------------------------------------------


def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=160)
    ids = torch.randint(0, 1000, (2, 21))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    return transformers.BertModel(config), {"input_ids": ids, "attention_mask": mask}


def vit() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(
        **{"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 160},
        image_size=48,
        patch_size=16,
    )
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 48, 48)}


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=250,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=160,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(0, 250, (2, 19))}


def resnet() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 96, 128], depths=[1, 2, 1, 1])
    return transformers.ResNetModel(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


def mobilenet() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.MobileNetV2Config(depth_multiplier=0.35)
    return transformers.MobileNetV2Model(config), {"pixel_values": torch.randn(1, 3, 64, 64)}


class Up(nn.Module):
    """What a UNet is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.AvgPool2d(2))
        self.norm = torch.nn.Sequential(
            torch.nn.GroupNorm(4, 16), torch.nn.SiLU(), torch.nn.Conv2d(16, 16, 3, padding=1)
        )
        self.up = torch.nn.Sequential(torch.nn.Upsample(scale_factor=2), torch.nn.Conv2d(16, 3, 1))

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.down(pixel_values)
        return {"out": self.up(x + self.norm(x))}


def unet() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Up(), {"pixel_values": torch.randn(2, 3, 12, 12)}


MODELS = {
    unet: {"gemm", "conv", "group_norm", "pool", "upsample"},
    bert: {"gemm", "pointwise", "attention", "norm"},  # of embeddings
    vit: {
        "gemm",
        "pointwise",
        "conv",
        "concat",
        "combine",
        "attention",
        "norm",
    },  # patches of an image are a convolution
    llama: {"gemm", "concat", "attention", "norm", "rotary"},  # with a cache that it makes
    resnet: {"gemm", "pointwise", "conv", "pool"},
    mobilenet: {"gemm", "pointwise", "conv", "conv_depthwise", "pool"},
}


def first_result(output: Any) -> torch.Tensor:
    return torch.as_tensor(next(iter(output.values())))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).double().norm() / expected.double().norm())


@pytest.mark.parametrize("make", MODELS)
def test_models_against_the_cpu_path(make: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]) -> None:
    torch.manual_seed(3)
    source, arguments = make()
    source.eval()
    plain = xopt.optimize(source, dtype=torch.bfloat16)
    offloaded = xopt.optimize(source, dtype=torch.bfloat16, config=xopt.Config(backend="sycl"))
    with torch.no_grad():
        expected = first_result(source(**arguments))
        on_cpu = first_result(plain(**arguments))
        before = sycl.calls()
        on_device = first_result(offloaded(**arguments))
        ran = {name.split()[0] for name, count in sycl.calls().items() if count > before[name]}
    assert ran == MODELS[make]
    assert relative_error(on_device, expected) < 1.3 * relative_error(on_cpu, expected)


def test_the_report_says_what_ran_on_the_cpu_instead() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.LSTM(8, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            head: torch.Tensor = self.head(self.steps(x)[0])
            return head

    source, x = Tagger().eval(), torch.randn(5, 2, 8)
    model = xopt.optimize(source, config=xopt.Config(backend="sycl"))
    with torch.no_grad():
        assert xopt.report(model).left_to_cpu == ()
        assert torch.allclose(model(x), source(x), atol=1e-5)
    report = xopt.report(model)
    assert report.left_to_cpu == ("recurrent_gates f32", "recurrent_rows f32")
    assert "On the CPU, since SYCL devices have no such kernel: recurrent_gates f32, recurrent_rows f32." in str(report)
    assert "Instances" not in str(report)
