"""LSTM, GRU and plain recurrent layers and cells, optimized: all that torch's forwards take, and whole taggers."""

from __future__ import annotations

import copy
import itertools
import pathlib
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import xopt
from xopt.modules.packed_parameter import PackedParameter

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
CELLS: dict[str, Any] = {"LSTMCell": nn.LSTMCell, "GRUCell": nn.GRUCell, "RNNCell": nn.RNNCell}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers": {"num_layers": 3, "dropout": 0.5},
    "both ways": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True, "bidirectional": True},
    "no bias": {"bias": False},
    "projected": {"proj_size": 9, "num_layers": 2, "bidirectional": True},
    "relu": {"nonlinearity": "relu"},
}
MADE = [
    (kind, name)
    for kind, name in itertools.product(KINDS, OPTIONS)
    if (name != "projected" or kind == "LSTM") and (name != "relu" or kind == "RNN")
]
FEATURES, UNITS = 13, 37
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")


def skip_where_torch_cannot(kind: str, dtype: torch.dtype) -> None:
    """Its LSTM in bf16 is oneDNN's alone, which lacks it on CPUs without AVX-512."""
    if kind == "LSTM" and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("NOT RUN: torch has no LSTM in bf16 on this CPU")


def is_as_exact(result: Any, torchs: Any, exact: Any) -> bool:
    """As torch's, or within two roundings of a float, where one sum's order or another is luck."""
    return relative_error(result, exact) <= max(1.1 * relative_error(torchs, exact), 2 * torch.finfo().eps)


def made(kind: str, name: str = "plain") -> Any:
    torch.manual_seed(0)
    return KINDS[kind](FEATURES, UNITS, **OPTIONS[name]).eval()


def tensors_of(result: Any) -> list[Tensor]:
    """All that a recurrent layer or cell answers with."""
    if isinstance(result, PackedSequence):
        return [result.data]
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors_of(part)]


def relative_error(result: Any, exact: Any) -> float:
    pairs = list(zip(tensors_of(result), tensors_of(exact), strict=True))
    assert all(one.shape == other.shape for one, other in pairs)
    distance = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    return float((distance / sum(float(other.double().square().sum()) for _, other in pairs)) ** 0.5)


def first_states(module: Any, batch: int | None) -> Any:
    torch.manual_seed(2)
    count = module.num_layers * (2 if module.bidirectional else 1)
    shape = (count,) if batch is None else (count, batch)
    hidden, cell = torch.randn(*shape, module.proj_size or UNITS), torch.randn(*shape, UNITS)
    return (hidden, cell) if module.mode == "LSTM" else hidden


def double(value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return value.to(torch.float64)
    if isinstance(value, tuple):
        return tuple(double(item) for item in value)
    return value.double()


def inputs(module: Any) -> list[tuple[Any, ...]]:
    torch.manual_seed(1)
    x, single = torch.randn(6, 5, FEATURES), torch.randn(7, FEATURES)
    batch = x.shape[0 if module.batch_first else 1]
    lengths = torch.tensor([2, 5, 1, 5, 3, 4][:batch])
    packed = pack_padded_sequence(x, lengths, batch_first=module.batch_first, enforce_sorted=False)
    in_order = pack_sequence([torch.randn(length, FEATURES) for length in (4, 2, 2)])
    return [
        *((x,), (x, first_states(module, batch)), (single,), (single, first_states(module, None))),
        *((x.transpose(0, 1).contiguous().transpose(0, 1),), (x[:1, :1],), (x[..., :1].expand_as(x),)),
        *((packed,), (packed, first_states(module, batch)), (in_order,), (in_order, first_states(module, 3))),
    ]


@pytest.mark.parametrize(("kind", "name"), MADE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_call_gives_what_torch_gives(kind: str, name: str, dtype: torch.dtype) -> None:
    source = made(kind, name)
    exact, optimized = copy.deepcopy(source).double(), xopt.optimize(source, dtype=dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    with torch.no_grad():
        for given in inputs(source):
            expected, result = exact(*double(given)), optimized(*given)
            assert type(result[0]) is type(expected[0])
            assert all(tensor.dtype == torch.float32 for tensor in tensors_of(result))
            assert relative_error(result, expected) < tolerance
            if isinstance(result[0], PackedSequence):
                assert torch.equal(result[0].batch_sizes, expected[0].batch_sizes)
                assert (result[0].sorted_indices is None) == (expected[0].sorted_indices is None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_torchs(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = KINDS[kind](96, 128, num_layers=2, bidirectional=True).eval()
    x = torch.randn(150, 6, 96)
    with torch.no_grad():
        exact = copy.deepcopy(source).double()(x.double())
        plain = copy.deepcopy(source).to(dtype)(x.to(dtype))
        result = xopt.optimize(source, dtype=dtype)(x)
    assert is_as_exact(result, plain, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_it_stays_what_it_was(kind: str) -> None:
    source = made(kind, "both ways")
    before = source.state_dict()
    optimized = xopt.optimize(source, dtype=torch.bfloat16)
    assert isinstance(optimized, KINDS[kind])
    assert type(optimized).__name__ == kind
    assert isinstance(optimized.weight_hh_l1_reverse, PackedParameter)
    assert [optimized.weight_ih_l0, optimized.weight_hh_l0] == optimized.all_weights[0][:2]
    assert repr(optimized) == repr(source)
    assert xopt.report(optimized).optimized_linear_share == 1.0
    optimized.flatten_parameters()
    x = torch.randn(6, 5, FEATURES)
    with torch.no_grad():
        result = optimized(x)
        for copied in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
            state = copied.state_dict()
            assert list(state) == list(before)
            for name, value in before.items():
                assert torch.equal(state[name], value.bfloat16() if name.startswith("weight") else value)
            assert relative_error(copied(x), result) == 0
    assert all(type(value) is nn.Parameter for value in source.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_change(kind: str) -> None:
    """By load_state_dict, a write to one of them, a change of dtype, and other weights for one call."""
    source, other = made(kind, "both ways"), made(kind, "both ways")
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(6, 5, FEATURES)
    with torch.no_grad():
        expected = other(x)
        optimized = xopt.optimize(source, dtype=torch.float32)
        optimized.load_state_dict(other.state_dict())
        assert relative_error(optimized(x), expected) < 1e-6
        optimized.weight_hh_l0.mul_(0.5)
        other.weight_hh_l0.mul_(0.5)
        assert relative_error(optimized(x), other(x)) < 1e-6
        for_one_call = {name: value.clone() for name, value in source.state_dict().items()}
        called = torch.func.functional_call(optimized, for_one_call, (x,))
        assert relative_error(called, source(x)) < 1e-6
        assert relative_error(optimized(x), other(x)) < 1e-6
        halved = optimized.to(torch.bfloat16)
        assert type(halved.weight_hh_l0) is PackedParameter
        assert halved._flat_weights[1] is halved.weight_hh_l0
        assert relative_error(halved(x.bfloat16()), other(x)) < 1e-2
        with pytest.raises(RuntimeError, match="weight_ih_l0"):
            optimized.load_state_dict({**other.state_dict(), "weight_ih_l0": torch.zeros(3, 3)})


def test_save_and_load(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    model = xopt.optimize(Tagger("LSTM").eval(), dtype=torch.bfloat16)
    xopt.save(model, tmp_path)
    loaded = xopt.load(tmp_path, Tagger("LSTM"))
    words = torch.randint(0, 50, (3, 8))
    with torch.no_grad():
        assert torch.equal(loaded(words), model(words))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(kind: str, dtype: torch.dtype) -> None:
    skip_where_torch_cannot(kind, dtype)
    source = made(kind, "both ways")
    optimized = xopt.optimize(source, dtype=dtype)
    x = torch.randn(6, 5, FEATURES)
    gradients = []
    for module in (source, optimized):
        leaf = x.clone().requires_grad_()
        module(leaf)[0].square().sum().backward()
        gradients.append(leaf.grad)
    assert relative_error(gradients[1], gradients[0]) < (1e-5 if dtype == torch.float32 else 3e-2)


WRONG: dict[str, tuple[Any, ...]] = {
    "features": (torch.randn(6, 5, FEATURES + 1),),
    "dimensions": (torch.randn(2, 6, 5, FEATURES),),
    "no steps": (torch.randn(0, 5, FEATURES),),
    "states of another batch": (torch.randn(6, 5, FEATURES), torch.randn(1, 4, UNITS)),
    "states without a batch": (torch.randn(6, 5, FEATURES), torch.randn(1, UNITS)),
    "states of another dtype": (torch.randn(6, 5, FEATURES), torch.randn(1, 5, UNITS).bfloat16()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs(kind: str, name: str) -> None:
    source = made(kind)
    optimized = xopt.optimize(source, dtype=torch.float32)
    given = WRONG[name] if kind != "LSTM" else (*WRONG[name][:1], *((state, state) for state in WRONG[name][1:]))
    with torch.no_grad():
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            source(*given)
        with pytest.raises(type(theirs.value)) as ours:
            optimized(*given)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequences_give_what_torch_gives(kind: str) -> None:
    source = made(kind, "both ways")
    with torch.no_grad():
        expected, result = (each(torch.randn(3, 0, FEATURES)) for each in (source, xopt.optimize(source)))
    assert [tensor.shape for tensor in tensors_of(result)] == [tensor.shape for tensor in tensors_of(expected)]


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_dtypes_under_autocast_are_torchs(kind: str) -> None:
    skip_where_torch_cannot(kind, torch.bfloat16)
    torch.manual_seed(0)
    source = (KINDS | CELLS)[kind](FEATURES, UNITS).eval()
    optimized = xopt.optimize(source, dtype=torch.bfloat16, config=xopt.Config(autocast=False))
    shape = (6, 5, FEATURES) if kind in KINDS else (5, FEATURES)
    state = torch.randn(1, 5, UNITS) if kind in KINDS else torch.randn(5, UNITS)
    for dtype, states in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        given: tuple[Any, ...] = (torch.randn(shape).to(dtype),)
        if states:
            given = (*given, (state, state) if kind.startswith("LSTM") else state)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            expected, result = source(*given), optimized(*given)
        assert [each.dtype for each in tensors_of(result)] == [each.dtype for each in tensors_of(expected)]
        assert relative_error(result, expected) < 2e-2


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cells(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    variants: list[dict[str, Any]] = [{}, {"bias": False}]
    for options in [*variants, *([{"nonlinearity": "relu"}] if kind == "RNNCell" else [])]:
        source = CELLS[kind](FEATURES, UNITS, **options).eval()
        exact, optimized = copy.deepcopy(source).double(), xopt.optimize(source, dtype=dtype)
        assert isinstance(optimized.weight_hh, PackedParameter)
        for shape in ((5,), (), (1,)):
            x, states = torch.randn(*shape, FEATURES), (torch.randn(*shape, UNITS), torch.randn(*shape, UNITS))
            hx = states if kind == "LSTMCell" else states[0]
            with torch.no_grad():
                for given in ((x,), (x, hx)):
                    result, expected = optimized(*given), exact(*double(given))
                    assert type(result) is type(expected)
                    assert relative_error(result, expected) < (1e-6 if dtype == torch.float32 else 1e-2)
            with pytest.raises((RuntimeError, ValueError)):
                optimized(torch.randn(*shape, FEATURES + 1))
        x = torch.randn(5, FEATURES, requires_grad=True)
        tensors_of(optimized(x))[0].sum().backward()
        assert x.grad is not None


def test_switches_and_reasons() -> None:
    class Own(nn.LSTM):
        def forward(self, input: Any, hx: Any = None) -> Any:
            return super().forward(input, hx)

    model = nn.ModuleDict(
        {"own": Own(3, 4), "normed": nn.utils.parametrizations.weight_norm(nn.GRU(3, 4), "weight_hh_l0")}
    )
    entries = {entry.path: entry for entry in xopt.report(xopt.optimize(model.eval())).entries}
    assert entries["own"].detail == "it has a forward of its own"
    assert "parametrization" in entries["normed"].detail
    variants: list[dict[str, Any]] = [{"config": xopt.Config(recurrent_prepack=False)}, {"optimize_lstm": False}]
    for options in variants:
        kept = xopt.optimize(made("LSTM"), dtype=torch.bfloat16, **options)
        assert type(kept.weight_hh_l0) is nn.Parameter
        assert xopt.report(kept).optimized_linear_share == 0.0


def test_shared_weights_stay_shared() -> None:
    first, second, cell = made("GRU"), made("GRU"), nn.GRUCell(FEATURES, UNITS)
    second.weight_hh_l0 = first.weight_hh_l0
    second.weight_ih_l0 = cell.weight_ih = first.weight_ih_l0
    x = torch.randn(6, 5, FEATURES)
    with torch.no_grad():
        expected = first(x), second(x), cell(x[0])
        model = xopt.optimize(nn.ModuleList([first, second, cell]).eval(), dtype=torch.float32)
        for part, given, wanted in zip(model, (x, x, x[0]), expected, strict=True):
            assert relative_error(part(given), wanted) < 1e-6
    assert model[0].weight_ih_l0 is model[1].weight_ih_l0 is model[2].weight_ih
    assert model[0].weight_hh_l0 is model[1].weight_hh_l0


def test_in_training_mode_nothing_is_packed() -> None:
    assert type(xopt.optimize(made("LSTM").train()).weight_hh_l0) is nn.Parameter


# ---- In models -----------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self, kind: str, lengths: bool = False) -> None:
        super().__init__()
        self.lengths = lengths
        self.words = nn.Embedding(50, 48)
        self.layers = KINDS[kind](48, 64, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
        self.tags = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 11))

    def forward(self, words: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.words(words)
        if lengths is None:
            hidden, _ = self.layers(x)
        else:
            packed, _ = self.layers(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            hidden, _ = pad_packed_sequence(packed, batch_first=True)
        return self.tags(hidden)  # type: ignore[no-any-return]


class Speller(nn.Module):
    """Goes on from an encoder's last state, a cell's step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 48)
        self.encoder = nn.GRU(48, 64, batch_first=True)
        self.cell = nn.GRUCell(48, 64)
        self.letters = nn.Linear(64, 50)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        _, last = self.encoder(x)
        hidden, outputs = last[0], []
        for step in range(4):
            hidden = self.cell(x[:, step], hidden)
            outputs.append(self.letters(hidden))
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*KINDS, "packed LSTM", "packed GRU", "cells"])
def test_models(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kind = name.removeprefix("packed ")
    source: nn.Module = Speller() if name == "cells" else Tagger(kind)
    source.eval()
    words, lengths = torch.randint(0, 50, (6, 20)), torch.tensor([20, 3, 12, 20, 1, 7])
    given = (words, lengths) if name.startswith("packed") else (words,)
    before = {key: value.clone() for key, value in source.state_dict().items()}
    model = xopt.optimize(source, dtype=dtype)
    with torch.no_grad():
        exact = copy.deepcopy(source).double()(*given)
        plain = copy.deepcopy(source).to(dtype)(*given)
        result = model(*given)
        again = model(*given)
    assert type(model) is type(source)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in source.state_dict().items())
    assert result.dtype == torch.float32
    assert torch.equal(result, again)
    assert is_as_exact(result, plain, exact)
    assert xopt.report(model).optimized_linear_share >= 0.95


def test_a_block_with_a_recurrent_layer_is_recorded() -> None:
    model = xopt.optimize(Tagger("LSTM").eval(), dtype=torch.bfloat16)
    words = torch.randint(0, 50, (6, 20))
    with torch.no_grad():
        model(words)
        fused = [name for fusion in xopt.report(model).fusions for name in fusion.fused]
        assert "linear+relu" in fused
        longer = torch.randint(0, 50, (2, 31))
        again = xopt.optimize(copy.deepcopy(model), dtype=torch.bfloat16)
        torch.testing.assert_close(model(longer), again(longer))


@pytest.mark.parametrize("name", [*KINDS, "cells"])
def test_compile_and_export(name: str) -> None:
    source = Speller() if name == "cells" else Tagger(name)
    model = xopt.optimize(source.eval(), dtype=torch.bfloat16)
    words = torch.randint(0, 50, (3, 9))
    with torch.no_grad():
        expected = model(words)
        # torch refuses recurrent layers in one graph, whosever they are, unless it is told not to.
        for allowed in (False, True):
            torch._dynamo.reset()
            with torch._dynamo.config.patch(allow_rnn=allowed):
                compiled = torch.compile(model, fullgraph=allowed, backend="aot_eager")
                # A program of the whole rounds less often.
                torch.testing.assert_close(compiled(words), expected, rtol=0, atol=1e-2)
        exported = torch.export.export(model, (words,)).module()
        torch.testing.assert_close(exported(words), expected, rtol=0, atol=1e-2)
