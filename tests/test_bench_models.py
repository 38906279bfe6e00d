"""The model bench on tiny models, from end to end. Nothing here depends on how fast the machine is."""

from __future__ import annotations

import json
import pathlib

import pytest

from xopt.bench import cli, model_peers, models
from xopt.bench.errors import BenchError
from xopt.bench.model_cases import CASES
from xopt.bench.model_report import CaseResult, Measured

pytest.importorskip("transformers")


def test_measures_and_reports(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    data, chart = tmp_path / "models.json", tmp_path / "models.png"
    arguments = ["--size", "tiny", "--rounds", "2", "--threads", "1", "--peers", "eager,ipex"]
    arguments += ["--cases", "bert-base 1x128,llama-1.1b decode", "--json", str(data), "--png", str(chart)]
    assert cli.main(["models", *arguments]) == 0
    report = json.loads(data.read_text())
    assert report["missing_peers"] == ([] if model_peers.is_installed("ipex") else ["ipex"])
    if report["missing_peers"]:
        assert "NOT MEASURED: ipex is not installed" in capsys.readouterr().out
    assert [result["case"] for result in report["results"]] == ["bert-base 1x128", "llama-1.1b decode"]
    for result in report["results"]:
        for contender in result["contenders"]:
            if contender["peer"] in ("xopt", "eager"):
                assert contender["error"] is None, contender
                assert len(contender["turns"]) == 2
                assert 0 < contender["relative_error"] < 0.1
                assert contender["setup_seconds"] > 0
                assert contender["peak_bytes"] > contender["weight_bytes"]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_contender_that_fails_is_named_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    options = cli.build_parser({"models": models}).parse_args(["models", "--size", "tiny", "--rounds", "1"])
    result = models.measure("bert-base 1x128", ["no such peer", "eager"], options, models.choose_cpus(1))
    broken, eager = result.contenders
    assert "no such peer" in str(broken.error)
    assert eager.was_timed


def test_a_process_that_dies_is_named() -> None:
    worker = models.Worker("eager")
    worker._process.kill()
    assert worker.ask(do="run", calls=1) is None
    assert "ended with status" in str(worker.measured.error)
    worker.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "nothing"], "no case begins with 'nothing'"),
        (["--peers", "tensorflow"], "unknown peer 'tensorflow'"),
        (["--threads", "100000"], "--threads 100000: expected 1 to"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--list"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == list(CASES)


def test_speedups_of_made_up_times() -> None:
    def measured(peer: str, *seconds: float) -> Measured:
        return Measured(peer, turns=[[each] for each in seconds])

    result = CaseResult("", False, [measured("xopt", 1, 2, 3), measured("a", 3, 6, 9), measured("b", 2, 8, 8)])
    assert result.speedup("a") == (3, 3)
    assert result.speedup("b") == (2, 4)
    assert result.best_peer() == "b"
    assert CaseResult("", False, [Measured("xopt", error="x"), measured("a", 1)]).speedup("a") is None


def test_choose_cpus_wants_as_many_as_there_are() -> None:
    with pytest.raises(BenchError):
        models.choose_cpus(0)
    assert len(models.choose_cpus(1)) == 1
