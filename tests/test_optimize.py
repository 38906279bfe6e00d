"""The promises of `xopt.optimize`, on small models of plain torch modules."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pathlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.nn import functional
from torch.nn.utils import parametrize, prune

import xopt
from xopt.modules.packed_parameter import PackedParameter

DTYPES = [None, torch.float32, torch.bfloat16, torch.float16]


class Tagger(nn.Module):
    """A user's own model: an embedding tied to its head, layers called twice, a raw parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 36)
        self.shift = nn.Parameter(torch.randn(36))
        self.inner = nn.Sequential(nn.Linear(36, 70), nn.GELU(), nn.Dropout(0.5), nn.Linear(70, 36, bias=False))
        self.norm = nn.LayerNorm(36)
        self.head = nn.Linear(36, 50)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(words) + self.shift
        for _ in range(2):
            x = self.norm(x + self.scale * self.inner(x))
        return {"logits": self.head(x), "last": x}


def tagger() -> Any:
    torch.manual_seed(0)
    return Tagger().eval()


def words() -> torch.Tensor:
    return torch.arange(21).reshape(3, 7)


def mlp(*, bias: bool = True) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33, bias=bias), nn.ReLU(), nn.Linear(33, 10, bias=bias)).eval()


def state_bytes(module: nn.Module) -> bytes:
    return b"".join(value.reshape(-1).view(torch.uint8).numpy().tobytes() for value in module.state_dict().values())


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


# ---- Results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_takes_and_returns_what_the_source_does(dtype: torch.dtype | None) -> None:
    source = tagger()
    optimized = xopt.optimize(source, dtype=dtype)
    with torch.no_grad():
        expected, result = source(words()), optimized(words())
        for name in expected:
            assert result[name].dtype == torch.float32
            tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype or torch.float32, 1e-5)
            assert relative_error(result[name], expected[name]) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_less_exact_than_torch_in_that_dtype(dtype: torch.dtype) -> None:
    source, optimized = tagger(), xopt.optimize(tagger(), dtype=dtype)
    with torch.no_grad():
        exact = tagger().double()(words())["logits"]
        theirs = relative_error(tagger().to(dtype)(words())["logits"], exact)
        assert relative_error(optimized(words())["logits"], exact) <= 1.1 * theirs
        assert relative_error(source(words())["logits"], exact) < 1e-5


def test_runs_on_xopts_kernels() -> None:
    def calls() -> int:
        return sum(kernel.calls for kernel in xopt.kernels() if kernel.name == "gemm" and kernel.dtype == "bf16")

    optimized = xopt.optimize(mlp(), dtype=torch.bfloat16)
    with torch.no_grad():
        optimized(torch.randn(4, 20))  # the first call also records
        before = calls()
        optimized(torch.randn(4, 20))
    assert calls() == before + 2


def test_follows_autocast() -> None:
    optimized = xopt.optimize(mlp(), dtype=torch.bfloat16)
    x = torch.randn(4, 20)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert optimized(x).dtype == torch.bfloat16
        assert optimized[0](x).dtype == torch.bfloat16
    with torch.inference_mode():
        assert optimized(x).dtype == torch.float32
        assert optimized[0](x).dtype == torch.float32
        assert optimized[0](x.bfloat16()).dtype == torch.bfloat16


def test_gradients_of_inputs() -> None:
    source, optimized = mlp(), xopt.optimize(mlp(), dtype=torch.float32)
    x = torch.randn(4, 20, requires_grad=True)
    (expected,) = torch.autograd.grad(source(x).square().sum(), x)
    (result,) = torch.autograd.grad(optimized(x).square().sum(), x)
    torch.testing.assert_close(result, expected)
    bf16 = xopt.optimize(mlp(), dtype=torch.bfloat16)
    (result,) = torch.autograd.grad(bf16(x).square().sum(), x)
    assert relative_error(result, expected) < 2e-2


def test_grad_mode_without_a_wish_for_gradients() -> None:
    assert not xopt.optimize(mlp(), dtype=torch.bfloat16)(torch.randn(4, 20)).requires_grad


def test_functional_call_uses_the_weights_that_it_is_given() -> None:
    optimized, other = xopt.optimize(mlp(), dtype=torch.float32), mlp()
    nn.init.normal_(other[0].weight)
    x = torch.randn(4, 20)
    with torch.no_grad():
        result = torch.func.functional_call(optimized, dict(other.named_parameters()), (x,))
        torch.testing.assert_close(result, other(x))
        torch.testing.assert_close(optimized(x), mlp()(x))


def test_compile_and_export() -> None:
    optimized = xopt.optimize(tagger(), dtype=torch.bfloat16)
    with torch.no_grad():
        expected = optimized(words())["logits"]
        compiled = torch.compile(optimized, fullgraph=True, backend="aot_eager")(words())["logits"]
        assert relative_error(compiled, expected) < 1e-2  # torch's decompositions round elsewhere
        exported = torch.export.export(optimized, (words(),)).module()(words())["logits"]
        assert relative_error(exported, expected) < 1e-2


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"result": y, "states": (y + 1, [y * 2]), "count": 3}


@torch.no_grad()
def test_compile_of_a_model_that_answers_in_nested_containers() -> None:
    optimized, x = xopt.optimize(States().eval(), dtype=torch.bfloat16), torch.randn(4, 20)
    torch._dynamo.reset()
    expected, compiled = optimized(x), torch.compile(optimized, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(compiled, expected, atol=2e-2, rtol=2e-2)
    assert compiled["states"][1][0].dtype == torch.float32


# ---- The same model -------------------------------------------------------------------------------------------------


def test_class_names_and_hooks_stay() -> None:
    source = tagger()
    called: list[str] = []
    source.inner[0].register_forward_hook(lambda *_: called.append("inner"))
    source.remark = "kept"
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    assert type(optimized) is Tagger
    assert optimized.remark == "kept"
    assert [name for name, _ in optimized.named_modules()] == [name for name, _ in source.named_modules()]
    assert [name for name, _ in optimized.named_parameters()] == [name for name, _ in source.named_parameters()]
    assert all(isinstance(parameter, nn.Parameter) for parameter in optimized.parameters())
    for name in ("inner.0", "inner.3", "head"):
        assert isinstance(optimized.get_submodule(name), nn.Linear)
        assert repr(optimized.get_submodule(name)) == repr(source.get_submodule(name))
    optimized(words())
    assert called == ["inner", "inner"]


@pytest.mark.parametrize("keep_vars", [False, True])
def test_state_dict_is_the_sources(keep_vars: bool) -> None:
    source = tagger()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    for theirs, ours in ((source, optimized), (source.inner, optimized.inner), (source.inner[0], optimized.inner[0])):
        expected, result = theirs.state_dict(), ours.state_dict(keep_vars=keep_vars)
        assert list(result) == list(expected)
        for key, value in result.items():
            assert type(value) in (torch.Tensor, nn.Parameter)
            cast = value.dtype == torch.bfloat16
            assert cast == key.endswith("weight") and "norm" not in key if cast else value.dtype == expected[key].dtype
            torch.testing.assert_close(value.detach(), expected[key].to(value.dtype), rtol=0, atol=0)


def test_load_state_dict_packs_again() -> None:
    other = tagger()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    expected = xopt.optimize(other, dtype=torch.bfloat16)(words())["logits"]
    of_optimized = xopt.optimize(other, dtype=torch.bfloat16).state_dict()
    for state, assign in ((other.state_dict(), False), (of_optimized, False), (of_optimized, True)):
        optimized = xopt.optimize(tagger(), dtype=torch.bfloat16)
        optimized.load_state_dict(state, assign=assign)
        torch.testing.assert_close(optimized(words())["logits"], expected)


def test_load_state_dict_reports_what_does_not_fit() -> None:
    optimized = xopt.optimize(mlp(), dtype=torch.bfloat16)
    before = optimized(torch.ones(1, 20))
    state = mlp().state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        optimized.load_state_dict(state | {"0.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match=r"Missing key.*2\.weight"):
        optimized.load_state_dict({key: value for key, value in state.items() if key != "2.weight"})
    torch.testing.assert_close(optimized(torch.ones(1, 20)), before, rtol=2e-2, atol=2e-2)


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), by_torch_save])
def test_copies_are_whole_and_independent(copied: Callable[[nn.Module], nn.Module]) -> None:
    optimized = xopt.optimize(tagger(), dtype=torch.bfloat16)
    expected = optimized(words())["logits"]
    twin: Any = copied(optimized)
    with torch.no_grad():
        optimized.inner[0].weight.zero_()
    assert type(twin) is Tagger
    assert isinstance(twin.inner[0], nn.Linear)
    assert twin.head.weight is twin.words.weight
    assert torch.equal(twin(words())["logits"], expected)
    assert not torch.equal(optimized(words())["logits"], expected)
    assert xopt.report(twin) == xopt.report(optimized)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [mlp, tagger])
def test_the_original_is_untouched(kind: Callable[[], nn.Module], dtype: torch.dtype | None) -> None:
    source = kind()
    before = state_bytes(source)
    parameters = [(name, id(parameter)) for name, parameter in source.named_parameters()]
    optimized = xopt.optimize(source, dtype=dtype)
    with torch.no_grad():
        for parameter in optimized.parameters():
            parameter.zero_()
    assert state_bytes(source) == before
    assert [(name, id(parameter)) for name, parameter in source.named_parameters()] == parameters
    assert all(parameter.requires_grad for parameter in source.parameters())
    assert "forward" not in source.__dict__
    with pytest.raises(ValueError, match="expected what xopt\\.optimize returned"):
        xopt.report(source)


def test_in_place_keeps_one_copy_of_a_weight() -> None:
    source: Any = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).eval()
    gone = [weakref.ref(layer.weight) for layer in source]
    assert xopt.optimize(source, dtype=torch.bfloat16, inplace=True) is source
    gc.collect()
    assert all(weight() is None for weight in gone)
    packed = sum(layer.weight.packed.nbytes for layer in source)
    assert packed <= 1.05 * 8 * 256 * 256 * 2


def test_a_dropped_model_frees_its_memory_at_once() -> None:
    optimized = xopt.optimize(mlp(), dtype=torch.bfloat16)
    packed = weakref.ref(optimized[0].weight)
    gc.disable()
    try:
        del optimized
        assert packed() is None
    finally:
        gc.enable()


def test_shared_weights_stay_shared() -> None:
    source: Any = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)).eval()
    source[1].weight = source[0].weight
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    assert isinstance(optimized[0].weight, PackedParameter)
    assert optimized[0].weight is optimized[1].weight
    state = optimized.state_dict()
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    optimized.float()
    assert optimized[0].weight is optimized[1].weight
    assert optimized[0].weight.dtype == torch.float32


def test_a_packed_parameter_behaves_like_its_values() -> None:
    layer = nn.Linear(20, 33)
    values = layer.weight.detach().bfloat16()
    optimized: Any = xopt.optimize(nn.Sequential(layer).eval(), dtype=torch.bfloat16)
    weight = optimized[0].weight
    assert weight.shape == (33, 20)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.t(), values.t())
    with torch.no_grad():
        weight.mul_(2)
        assert torch.equal(weight + 0, values * 2)
        nn.init.ones_(weight)
    assert torch.equal(weight.sum(), torch.tensor(660.0).bfloat16())


def test_changing_dtype_afterwards() -> None:
    optimized = xopt.optimize(mlp(), dtype=torch.bfloat16).double()
    x = torch.randn(4, 20, dtype=torch.float64)
    assert optimized[0].weight.dtype == torch.float64
    assert relative_error(optimized[0](x).detach(), mlp().double()[0](x).detach()) < 1e-2


# ---- What is left alone, and says so --------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, 2 * self.weight, self.bias)


class OddParameter(nn.Parameter):
    pass


def odd_linear(weight: nn.Parameter) -> nn.Linear:
    layer = nn.Linear(20, 20)
    layer.weight = weight
    return layer


def int8_linear() -> nn.Linear:
    return odd_linear(nn.Parameter(torch.ones(20, 20, dtype=torch.int8), requires_grad=False))


def sparse_linear(layout: torch.layout = torch.sparse_coo) -> nn.Linear:
    layer = nn.Linear(20, 20)
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse(layout=layout), requires_grad=False)
    return layer


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own forward": (lambda: Doubled(20, 20), "forward of its own"),
    "parametrization": (
        lambda: parametrize.register_parametrization(nn.Linear(20, 20), "weight", nn.Identity()),
        "parametrization",
    ),
    "meta": (lambda: nn.Linear(20, 20, device="meta"), "device meta"),
    "float64": (lambda: nn.Linear(20, 20).double(), "dtype torch.float64"),
    "sparse": (sparse_linear, "layout torch.sparse_coo"),
    "lazy": (lambda: nn.LazyLinear(20), "not initialized"),
    "max_norm": (lambda: nn.Embedding(20, 20, max_norm=1.0), "max_norm"),
    "pruned": (lambda: prune.random_unstructured(nn.Linear(20, 20), "weight", 0.5), "no parameter of its own"),
    "quantized": (lambda: quantize_dynamic(nn.Sequential(nn.Linear(20, 20)))[0], "quantized already"),
    "sparse rows": (lambda: sparse_linear(torch.sparse_csr), "layout torch.sparse_csr"),
    "int8": (int8_linear, "dtype torch.int8"),
    "kind of parameter": (lambda: odd_linear(OddParameter(torch.randn(20, 20))), "its weight is a OddParameter"),
    "script": (lambda: torch.jit.script(nn.Linear(20, 20)), "nothing to pack"),
}
# Torch itself cannot run these, on such inputs.
CANNOT_RUN = {"meta", "lazy", "max_norm", "int8", "sparse"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone_with_a_reason(name: str) -> None:
    make, reason = LEFT_ALONE[name]
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"odd": make(), "plain": nn.Linear(20, 20)}).eval()
    result = xopt.optimize(model, dtype=torch.bfloat16, inplace=True)
    entry = next(entry for entry in xopt.report(result).entries if entry.path == "odd")
    assert not entry.optimized
    assert reason in entry.detail
    assert isinstance(result["plain"].weight, PackedParameter)
    if name in ("own forward", "parametrization", "float64"):
        dtype = torch.float64 if name == "float64" else torch.float32
        assert result["odd"](torch.randn(2, 20, dtype=dtype)).dtype == dtype


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", sorted(set(LEFT_ALONE) - CANNOT_RUN - {"float64"}))
def test_what_is_left_alone_works_in_its_model(name: str, inplace: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), LEFT_ALONE[name][0](), nn.Linear(20, 20)).eval()
    x = torch.randn(3, 20)
    with torch.no_grad():
        expected = model(x)
        result = xopt.optimize(model, dtype=torch.bfloat16, inplace=inplace)(x)
        assert result.dtype == torch.float32
        assert relative_error(result, expected) < 0.02
        if not inplace:
            assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore:.*nested tensor")
def test_transformer_encoder_and_attention_come_out_right() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    source = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        expected = source(x)
        mask = torch.arange(9)[None] > torch.tensor([[8], [5]])
        expected_masked = source(x, src_key_padding_mask=mask)[~mask]
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            optimized = xopt.optimize(source, dtype=dtype)
            assert relative_error(optimized(x), expected) < tolerance
            masked = optimized(x, src_key_padding_mask=mask)[~mask]
            assert relative_error(masked, expected_masked) < tolerance


def test_training_mode_is_left() -> None:
    source = mlp().train()
    result = xopt.optimize(source, dtype=torch.bfloat16)
    assert result is not source
    assert not any(entry.optimized for entry in xopt.report(result).entries)
    assert "eval()" in str(xopt.report(result))
    result(torch.randn(2, 20)).sum().backward()


def test_level_o0_changes_nothing() -> None:
    source = mlp()
    result = xopt.optimize(source, dtype=torch.bfloat16, level="O0", inplace=True)
    assert result is source
    assert type(result[0].weight) is nn.Parameter
    assert "level O0" in str(xopt.report(result))


def test_optimizing_twice() -> None:
    once = xopt.optimize(mlp(), dtype=torch.bfloat16)
    twice = xopt.optimize(once, dtype=torch.bfloat16)
    x = torch.randn(4, 20)
    assert torch.equal(once(x), twice(x))
    assert "optimized already" in str(xopt.report(twice))


# ---- Config, arguments, report --------------------------------------------------------------------------------------


def test_config_switches() -> None:
    plain = xopt.optimize(tagger(), dtype=torch.bfloat16, config=xopt.Config(weights_prepack=False))
    assert type(plain.inner[0].weight) is nn.Parameter
    assert "weights_prepack=False" in str(xopt.report(plain))
    cold = xopt.optimize(tagger(), dtype=torch.bfloat16, config=xopt.Config(cast_embeddings=False))
    assert cold.words.weight.dtype == torch.float32
    islands = xopt.optimize(mlp(), dtype=torch.bfloat16, config=xopt.Config(autocast=False))
    assert not xopt.report(islands).notes
    assert islands(torch.randn(2, 20)).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: xopt.Config(weight_prepack=True),
            ValueError,
            "unknown switch 'weight_prepack'; known.*weights_prepack",
        ),
        (
            lambda: xopt.Config(autocast="no"),
            ValueError,
            "autocast: expected True or False, got 'no'",
        ),
        (lambda: xopt.optimize(mlp(), dtype=torch.int8), ValueError, "dtype: expected one of float32.*got torch.int8"),
        (lambda: xopt.optimize(mlp(), level="O2"), ValueError, "level: expected one of O0, O1, got 'O2'"),
        (lambda: xopt.optimize("model"), TypeError, "model: expected a torch.nn.Module, got str"),  # type: ignore[type-var]
        (lambda: xopt.optimize(mlp(), speed=1), TypeError, "unknown argument 'speed'; known arguments: .*inplace"),
        (lambda: xopt.optimize(mlp(), optimizer=object()), NotImplementedError, "optimizer: training"),
        (lambda: xopt.optimize(mlp(), graph_mode=True), NotImplementedError, "graph_mode"),
    ],
)
def test_bad_arguments(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_arguments_of_ipex(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="xopt"):
        result = xopt.optimize(
            mlp(),
            torch.bfloat16,
            optimizer=None,
            level="O1",
            inplace=False,
            conv_bn_folding=True,
            concat_linear=True,
            weights_prepack=False,
        )
    assert "concat_linear has no effect" in caplog.text
    assert type(result[0].weight) is nn.Parameter


def test_report_counts() -> None:
    report = xopt.report(xopt.optimize(tagger(), dtype=torch.bfloat16))
    by_path = {entry.path: entry for entry in report.entries}
    assert by_path["inner.0"].detail == "packed as bfloat16"
    assert by_path["head"].detail == "packed as bfloat16"
    assert by_path["words"].detail == "reads the packed weight of the linear layer that it shares it with"
    assert not by_path["norm"].optimized
    assert '"path": "inner.0"' in report.to_json()
    assert 0.0 < report.optimized_linear_share <= 1.0


def test_report_of_a_call_says_who_multiplies() -> None:
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(x, self.inner(x), torch.ones(8, 24)[:, :8])

    optimized = xopt.optimize(Tail().eval(), dtype=torch.float32)
    assert xopt.report(optimized).multiply_add_share is None
    x = torch.randn(4, 8)
    for sample in (x, (x,), {"x": x}):
        report = xopt.report(optimized, sample)
        assert report.multiply_add_share == 0.5
        assert dict(report.multiply_adds) == {"xopt.linear": 4 * 8 * 8, "aten.addmm": 4 * 8 * 8}
        assert "50.0% of the call's multiply-adds" in str(report)
        assert '"multiply_add_share": 0.5' in report.to_json()
    with pytest.raises(TypeError, match=r"report: sample_input: expected a tensor, .* got int"):
        xopt.report(optimized, 3)


# ---- Checkpoints ----------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: pathlib.Path) -> None:
    optimized = xopt.optimize(tagger(), dtype=torch.bfloat16)
    xopt.save(optimized, tmp_path / "checkpoint")
    for target in (Tagger, Tagger().eval(), Tagger()):
        loaded: Any = xopt.load(tmp_path / "checkpoint", target)
        assert type(loaded) is Tagger
        assert loaded.head.weight is loaded.words.weight
        assert torch.equal(loaded(words())["logits"], optimized(words())["logits"])


def damage_json(folder: pathlib.Path) -> None:
    (folder / "xopt.json").write_text("{")


def damage_weights(folder: pathlib.Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def damage_format(folder: pathlib.Path) -> None:
    (folder / "xopt.json").write_text('{"format": 99}')


def remove_weights(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_manifest(folder: pathlib.Path) -> None:
    (folder / "xopt.json").write_text("[]")


@pytest.mark.parametrize("damage", [damage_json, damage_weights, damage_format, damage_manifest, remove_weights])
def test_a_corrupt_checkpoint_loads_nothing(tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None]) -> None:
    xopt.save(xopt.optimize(mlp(), dtype=torch.bfloat16), tmp_path)
    damage(tmp_path)
    model = nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 10))
    before = state_bytes(model)
    with pytest.raises(xopt.CheckpointError, match="load: "):
        xopt.load(tmp_path, model)
    assert state_bytes(model) == before


def test_a_checkpoint_of_another_model_loads_nothing(tmp_path: pathlib.Path) -> None:
    xopt.save(xopt.optimize(mlp(), dtype=torch.bfloat16), tmp_path)
    with pytest.raises(xopt.CheckpointError, match="expected a Sequential, got a Tagger"):
        xopt.load(tmp_path, Tagger)
    with pytest.raises(xopt.CheckpointError, match=r"does not fit the model in 3 tensors, first '0.bias'"):
        xopt.load(tmp_path, nn.Sequential(nn.Linear(20, 34), nn.ReLU(), nn.Linear(34, 10)))
    with pytest.raises(xopt.CheckpointError, match="no xopt checkpoint: FileNotFoundError"):
        xopt.load(tmp_path / "nothing", mlp())
