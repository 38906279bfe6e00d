"""Replay of single kernels of a profile. Nothing here depends on how fast the machine is."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import xopt
from tests.test_bench import onednn_has
from xopt.bench import cli, replay
from xopt.bench.errors import BenchError
from xopt.bench.recurrent_operands import lengths
from xopt.bench.replay_contender import RECORDED, Contender, blockings_of, levels_of
from xopt.bench.replay_contenders import contenders_of
from xopt.bench.replay_operands import operands_of


class Layers(nn.Module):
    """Something of each kind that is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.wider = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1)
        self.tags = nn.LSTM(16, 20, num_layers=2, bidirectional=True, batch_first=True)
        self.states, self.plain = nn.GRU(40, 24), nn.RNN(24, 16)
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.words = nn.Embedding(10, 16)

    def forward(self, image: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.relu(self.conv(self.wider(image))).flatten(2).transpose(1, 2)
        rows = self.norm(rows + self.down(nn.functional.gelu(self.up(rows))))
        heads = rows.unflatten(-1, (2, 8)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        out: torch.Tensor = attended.transpose(1, 2).flatten(2) + self.words(ids)
        lengths = torch.full((out.shape[0],), out.shape[1])
        lengths[-1] = 3
        packed = nn.utils.rnn.pack_padded_sequence(self.tags(out)[0], lengths, batch_first=True)
        sequences: torch.Tensor = self.plain(self.states(packed)[0])[0].data
        return sequences


@pytest.fixture(scope="module", params=[None, torch.float32, torch.bfloat16], ids=["plain", "f32", "bf16"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    model: nn.Module = Layers().eval()
    if request.param is not None:
        model = xopt.optimize(model, dtype=request.param)
    inputs = torch.randn(2, 8, 3, 3), torch.randint(0, 10, (2, 36))
    taken = xopt.profile(model, *inputs, steps=1, warmup=2, roofs=False)
    file = tmp_path_factory.mktemp("replay") / "trace.json"
    taken.trace(file)
    # Lengths of sequences are no values to be made up.
    return [kernel for kernel in replay.read_kernels(file) if "pack_padded" not in kernel["name"]]


def test_each_kernel_is_replayed_and_contenders_agree(
    kernels: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST_COPIES", 2)
    monkeypatch.setattr(replay, "LEAST_ROUNDS", 2)
    ran = []
    for kernel in kernels:
        result = replay.replay(kernel, all_instances=True, seconds=0.0)
        unknown = [reason for reason in result.failures.values() if "UnavailableError" not in reason]
        assert not unknown, (kernel["name"], unknown)
        assert set(result.hot) == set(result.cold)
        assert RECORDED in result.cold, (kernel["name"], result.failures)
        instances = [*levels_of(kernel), *(name for name, _ in blockings_of(kernel))]
        assert {f"xopt, {name}" for name in instances} <= set(result.cold)
        if kernel["operator"] in ("xopt::linear", "xopt::conv", "xopt::conv_transpose"):
            assert len(instances) > len(levels_of(kernel)) > 1
        assert result.verdict().startswith(kernel["name"])
        ran += [name for name in result.cold if name != RECORDED]
    assert any(name.startswith("xopt, ") for name in ran)
    dtypes = {kernel["dtype"] for kernel in kernels if kernel["operator"] == "xopt::linear"}
    assert any(name.startswith("oneDNN") for name in ran) or not all(map(onednn_has, dtypes))
    operators = {kernel["operator"] for kernel in kernels}
    if "xopt::linear" in operators:
        assert {"xopt::recurrent", "xopt::conv_transpose"} <= operators
        recurrent = [kernel for kernel in kernels if kernel["operator"] == "xopt::recurrent"]
        assert {kernel["arguments"]["cell"] for kernel in recurrent} == {"lstm", "gru", "rnn_tanh"}
        assert ran.count("torch") >= len(recurrent)


def test_operands_are_those_that_were_recorded(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        for name, value in operands_of(kernel).items():
            if isinstance(value, torch.Tensor):
                recorded = kernel["arguments"][name]
                assert list(value.shape) == recorded["shape"]
                assert xopt.ops.costs.joined(value.stride()) == xopt.ops.costs.joined(recorded["strides"])


def test_a_contender_that_is_off_gets_no_time(kernels: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    product = next(kernel for kernel in kernels if kernel["category"] == "gemm")
    true = contenders_of(product, False)[0]
    wrong = Contender("wrong", true.make, lambda operands: torch.zeros_like(replay._first(true.run(operands))))
    monkeypatch.setattr(replay, "contenders_of", lambda kernel, all_instances: [true, wrong])
    result = replay.replay(product, all_instances=False, seconds=0.0)
    assert "wrong" not in result.cold
    assert "is off what was recorded" in result.failures["wrong"]


def test_the_verdict_names_the_fastest() -> None:
    result = replay.Replayed("a kernel", None, 1.0, cold={RECORDED: 2.0, "other": 1.0}, gains={"other": 2.0})
    assert result.verdict() == "a kernel: other is 2.00 times as fast as what ran"
    result.gains["other"] = 1.01
    assert result.verdict() == "a kernel: none is faster than what ran"
    gains = replay._gains({RECORDED: [2.0, 4.0, 4.0], "other": [1.0, 4.0, 4.0], "less": [0.1, 0.1, 0.1]}, {"other"})
    assert gains == {"other": 1.0}


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    taken = xopt.profile(model, torch.randn(4, 32), steps=1, warmup=1, roofs=False)
    data, out = tmp_path / "profile.json", tmp_path / "replay.json"
    data.write_text(taken.to_json())
    assert cli.main(["replay", str(data), "--kernel", "addmm", "--seconds", "0", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert len(written) == 1
    assert {RECORDED, "xopt"} <= set(written[0]["cold"])
    assert cli.main(["replay", str(data), "--kernel", "nothing like it"]) == 2
    assert "no kernel's name contains" in capsys.readouterr().err
    data.write_text("[]")
    with pytest.raises(BenchError, match="expected what xopt-profile"):
        replay.read_kernels(data)


@pytest.mark.parametrize(("steps", "batch", "rows"), [(5, 1, 5), (36, 2, 39), (10, 4, 22), (3, 3, 9)])
def test_lengths_of_sequences_are_possible(steps: int, batch: int, rows: int) -> None:
    sizes = lengths(steps, batch, rows).tolist()
    assert (len(sizes), sizes[0], sum(sizes)) == (steps, batch, rows)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= 1
