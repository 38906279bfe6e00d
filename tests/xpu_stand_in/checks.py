"""What tests/test_xpu.py runs in a process of its own, on the stand-in for device xpu."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xopt
from tests import xpu_stand_in
from tests.families import find_family
from tests.test_sycl import MODELS, MOST_DEPTH, first_result, relative_error, resnet
from xopt.sycl import xpu

xpu_stand_in.start()
to_xpu = xpu_stand_in.to_xpu
ops = torch.ops.xopt

PRODUCTS = ("linear", "linear_gated", "linear_norm", "qlinear", "weight_only")
FAMILIES = (*PRODUCTS, "conv", "batch_norm", "group_norm", "pool", "adaptive_pool", "upsample")
OTHERS = ("norm", "softmax", "rotary", "concat", "combine", "pointwise", "attention")


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_operators_against_float64(name: str) -> None:
    family = find_family(name)

    def is_meant(case: Any) -> bool:
        return getattr(case, "depth", 0) <= MOST_DEPTH

    with xpu_stand_in.OnXpu() as on_xpu:
        ran = family.run_all(filter(is_meant, family.cases(seed=78, count=20)))
    assert on_xpu.calls >= ran > 5


def on_device(*shape: int) -> torch.Tensor:
    return to_xpu(torch.randn(*shape))


@torch.no_grad()
def test_a_chain_of_operators_neither_waits_nor_copies() -> None:
    weight = ops.linear_pack(on_device(48, 48) / 7, dtype=torch.float32)
    x = on_device(20, 48)

    def chain() -> torch.Tensor:
        value = x
        for _ in range(6):
            value = ops.linear_norm(value, weight, 48, None, value)[0]
        return value

    expected = chain()
    copies, waits = xpu_stand_in.copies(), xpu.synchronizations()
    got = chain()
    assert (xpu_stand_in.copies(), xpu.synchronizations()) == (copies, waits)
    assert got.device == xpu_stand_in.DEVICE
    assert xpu_stand_in.is_device_memory(got)
    assert torch.equal(got.cpu(), expected.cpu())


@torch.no_grad()
def test_scratch_memory_grows_without_a_wait() -> None:
    """What kernels on their way still use is freed after them."""
    sizes = [8 * 3**step for step in range(6)]
    rows = [on_device(size, 64) for size in sizes]
    weight = ops.linear_pack(on_device(64, 64) / 8, dtype=torch.float32)
    before = xpu.synchronizations()
    results = [ops.linear_norm(each, weight, 64)[0] for each in rows]
    assert xpu.synchronizations() == before
    plain = ops.linear_unpack(weight, 64, 64, torch.float32).cpu()
    for each, result in zip(rows, results, strict=True):
        expected = torch.nn.functional.layer_norm(each.cpu() @ plain.t(), (64,))
        assert torch.allclose(result.cpu(), expected, atol=1e-4)


@torch.no_grad()
def test_packed_weights_lie_on_the_device_and_come_back() -> None:
    weight = torch.randn(40, 70)
    packed = ops.linear_pack(to_xpu(weight), dtype=torch.float32)
    assert xpu_stand_in.is_device_memory(packed)
    assert torch.equal(packed.cpu(), ops.linear_pack(weight, dtype=torch.float32))
    assert torch.equal(ops.linear_unpack(packed, 40, 70, torch.float32).cpu(), weight)
    x = on_device(3, 70)
    copies = xpu_stand_in.copies()
    expected = ops.linear(x, packed, 40)
    assert xpu_stand_in.copies() == copies  # its header is known to the host
    cloned = to_xpu(packed.cpu())
    copies = xpu_stand_in.copies()
    got = ops.linear(x, cloned, 40)
    assert xpu_stand_in.copies() == copies + 1  # that of a copy is read
    assert torch.equal(got.cpu(), expected.cpu())


@torch.no_grad()
def test_the_header_of_a_dropped_weight_is_forgotten() -> None:
    """Another weight may get its memory."""
    x = on_device(3, 64)
    for dtype in (torch.bfloat16, torch.float16) * 10:
        weight = ops.linear_pack(on_device(64, 64), dtype=dtype)
        plain = ops.linear_unpack(weight, 64, 64, dtype).cpu().float()
        assert torch.allclose(ops.linear(x, weight, 64).cpu(), x.cpu() @ plain.t(), atol=0.3)
        del weight


ON_XPU = "expected a tensor on xpu:0, got one on the CPU"
MIXED = [
    (
        lambda x, w, b: ops.linear(x.cpu(), w, 16),
        "xopt::linear: input: expected a tensor on xpu, where another .* CPU",
    ),
    (lambda x, w, b: ops.linear(x, w.cpu(), 16), f"xopt::linear: packed: {ON_XPU}"),
    (lambda x, w, b: ops.linear(x, w, 16, b.cpu()), f"xopt::linear: bias: {ON_XPU}"),
    (lambda x, w, b: ops.linear_norm(x, w, 16, None, x.cpu()), f"xopt::linear_norm: residual: {ON_XPU}"),
    (lambda x, w, b: ops.rms_norm(x, x[0].cpu()), f"xopt::rms_norm: weight: {ON_XPU}"),
    (
        lambda x, w, b: ops.linear_pack_gated(x, x.cpu(), dtype=x.dtype),
        ".*_gated: gate: expected tensors on one device",
    ),
    (
        lambda x, w, b: ops.packed_rows(w, b.long(), 16, 32, x.dtype),
        "xopt::packed_rows: .* on xpu, .* no kernel",
    ),
    (lambda x, w, b: ops.linear(x, w, 17), "xopt::linear: out_features: expected 16, the packed weight's"),
    (
        lambda x, w, b: ops.linear(x, b.byte(), 16),
        "xopt::linear: packed: .* it is shorter than the 64 bytes",
    ),
]


@torch.no_grad()
@pytest.mark.parametrize(("call", "message"), MIXED)
def test_bad_arguments(call: Callable[..., object], message: str) -> None:
    x, b = on_device(4, 32), on_device(16)
    w = ops.linear_pack(on_device(16, 32), dtype=torch.float32)
    with pytest.raises(RuntimeError, match=message) as caught:
        call(x, w, b)
    assert "\n" not in str(caught.value)
    assert ops.linear(x, w, 16).shape == (4, 16), "the next call is wrong"


@torch.no_grad()
def test_a_kernel_that_only_the_cpu_has_is_named() -> None:
    weight = torch.randint(-9, 9, (8, 4, 3, 3), dtype=torch.int8)
    packed = ops.conv_pack_int8(to_xpu(weight), to_xpu(torch.ones(8)))
    with pytest.raises(RuntimeError, match=r"qconv: .* for which this operator has no kernel"):
        ops.qconv(
            *(to_xpu(torch.zeros(1, 4, 5, 5, dtype=torch.uint8)), to_xpu(torch.ones(1)), None, packed, [8, 4, 3, 3]),
            stride=[1, 1],
            padding=[0] * 4,
            dilation=[1, 1],
        )


@torch.no_grad()
def test_memory_that_is_not_there_is_an_error() -> None:
    x = on_device(1, 1).expand(2**20, 2**22)
    with pytest.raises(RuntimeError, match=r"no memory left on xpu:0 for a tensor of shape \[1048576, 4194304\] and"):
        ops.softmax(x)
    assert ops.softmax(on_device(2, 3)).shape == (2, 3)


@torch.no_grad()
def test_a_process_forked_after_the_first_call_is_told() -> None:
    x = on_device(2, 3)
    ops.softmax(x)
    child = os.fork()
    if child == 0:
        try:
            ops.softmax(x)
        except RuntimeError as error:
            os._exit(0 if "before this process was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- Whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_models_against_the_cpu_path(make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]) -> None:
    torch.manual_seed(3)
    source, arguments = make()
    source.eval()
    plain = xopt.optimize(source, dtype=torch.bfloat16)
    expected = first_result(source(**arguments))
    on_cpu = first_result(plain(**arguments))
    moved = xopt.optimize(copy.deepcopy(source)._apply(to_xpu), dtype=torch.bfloat16)
    arguments = {name: to_xpu(value) for name, value in arguments.items()}
    before, waits = xopt.sycl.calls(), xpu.synchronizations()
    result = first_result(moved(**arguments))
    ran = {name.split()[0] for name, count in xopt.sycl.calls().items() if count > before[name]}
    assert result.device == xpu_stand_in.DEVICE
    assert xpu.synchronizations() == waits
    # torch's autocast for xpu interpolates in fp32, which is left to it.
    assert ran == MODELS[make] - {"upsample"}
    assert relative_error(result.cpu(), expected) < 1.3 * relative_error(on_cpu, expected)


@torch.no_grad()
def test_an_optimized_model_moves_there_and_back() -> None:
    source, arguments = resnet()
    model = xopt.optimize(source.eval(), dtype=torch.float32)
    expected = first_result(model(**arguments))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model._apply(to_xpu)
    assert {parameter.device for parameter in model.parameters()} == {xpu_stand_in.DEVICE}
    got = first_result(model(**{name: to_xpu(value) for name, value in arguments.items()}))
    assert torch.allclose(got.cpu(), expected, atol=1e-3)
    assert all(torch.equal(value.cpu(), state[name]) for name, value in model.state_dict().items())
    model.load_state_dict(state)
    again = first_result(model(**{name: to_xpu(value) for name, value in arguments.items()}))
    assert torch.equal(again.cpu(), got.cpu())
    model._apply(lambda tensor: tensor.cpu())
    assert torch.allclose(first_result(model(**arguments)), expected, atol=1e-5)


@torch.no_grad()
def test_a_copied_model_reads_no_headers_from_the_device() -> None:
    model = xopt.optimize(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)).eval()._apply(to_xpu))
    copied = copy.deepcopy(model)
    x = on_device(3, 32)
    expected = copied(x).cpu()
    copies = xpu_stand_in.copies()
    got = copied(x)
    assert xpu_stand_in.copies() == copies
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(model(x).cpu(), expected)


def test_what_has_no_kernel_there_is_left_and_the_report_says_so() -> None:
    model = nn.ModuleDict({"up": nn.ConvTranspose2d(4, 4, 2), "steps": nn.LSTM(4, 4), "linear": nn.Linear(4, 4)})
    optimized = xopt.optimize(model.eval()._apply(to_xpu))
    entries = {entry.path: entry for entry in xopt.report(optimized).entries}
    assert entries["linear"].optimized
    for path in ("up", "steps"):
        assert not entries[path].optimized
        assert entries[path].detail == "it is on xpu:0, for which it has no kernel"


def test_without_the_part_a_model_on_xpu_is_left_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xopt.sycl, "available", lambda: False)
    (entry,) = xopt.report(xopt.optimize(nn.Linear(4, 4).eval()._apply(to_xpu))).entries
    assert not entry.optimized
    assert entry.detail == "its weight is on device xpu:0, which takes the SYCL part"


@pytest.mark.parametrize("optimized_on", ["cpu", "xpu"])
@torch.no_grad()
def test_a_tied_table_stays_plain(optimized_on: str) -> None:
    """Rows out of packed weights have a kernel on the CPU only."""
    model = nn.ModuleDict({"table": nn.Embedding(50, 32), "head": nn.Linear(32, 50, bias=False)}).eval()
    head: Any = model["head"]
    head.weight = model["table"].weight
    moved = copy.deepcopy(model)
    moved = xopt.optimize(moved)._apply(to_xpu) if optimized_on == "cpu" else xopt.optimize(moved._apply(to_xpu))
    tokens = torch.randint(0, 50, (2, 7))
    expected = model["head"](model["table"](tokens))
    got = moved["head"](moved["table"](to_xpu(tokens)))
    assert torch.allclose(got.cpu(), expected, atol=1e-4)
    assert moved["head"].weight is moved["table"].weight
