"""The model bench on tiny models, from end to end. Nothing here depends on how fast the machine is."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from xopt.bench import cli, model_peers, model_report, models
from xopt.bench.errors import BenchError, WrongResultError
from xopt.bench.model_case import BEST
from xopt.bench.model_cases import CASES
from xopt.bench.model_process import ContenderError, Crew, Worker
from xopt.bench.model_results import CaseResult, Measured, Plan, summarize
from xopt.bench.model_worker import essence, relative_error

pytest.importorskip("transformers")
pytest.importorskip("diffusers")


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one call: times mean nothing here."""
    monkeypatch.setattr(models, "TURN_SECONDS", 0)
    monkeypatch.setattr(models, "PAUSE_SECONDS", 0)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Processes that several tests use: each takes seconds to import what it needs."""
    with Crew() as crew:
        yield crew


def make_plan(*peers: str, cases: tuple[str, ...] = ("bert-base 1x128",), dtype: str = "bfloat16") -> Plan:
    return Plan(cases, peers, [], dtype, models.choose_cpus(1), rounds=2, size="tiny")


def test_measures_and_reports(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, crew: Crew
) -> None:
    """The first that the processes do, before they serve the tests that follow."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(models, "Crew", lambda: contextlib.nullcontext(crew))
    data, chart = tmp_path / "models.json", tmp_path / "models.png"
    arguments = ["--size", "tiny", "--rounds", "2", "--threads", "1", "--peers", "eager,ipex"]
    arguments += ["--json", str(data), "--png", str(chart)]
    assert cli.main(["models", *arguments]) == 0
    document = json.loads(data.read_text())
    assert (document["kind"], document["threads"], document["setting"]["dtype"]) == ("models", 1, "bfloat16")
    assert document["setting"]["missing"] == ([] if model_peers.is_installed("ipex") else ["ipex"])
    if document["setting"]["missing"]:
        missing = "NOT MEASURED: ipex is not installed"
        assert missing in document["notes"]
        assert capsys.readouterr().out.count(missing) == 2  # before a long run, and where its end is looked at
    assert [row["case"] for row in document["rows"]] == [name for name, case in CASES.items() if not case.only_by_name]
    for row in document["rows"]:
        _check_row(row)
    first = document["rows"][0]  # of processes that had held nothing before
    for contender in (first["contenders"]["xopt"], first["contenders"]["eager"]):
        assert contender["peak_bytes"] >= 2 * first["weight_bytes"]  # in fp32 at first
        assert 0 < contender["steady_bytes"] <= contender["peak_bytes"]
    decoding = next(row for row in document["rows"] if row["decodes"])
    share = decoding["gb_per_s"] / decoding["read_roof_gb_per_s"]
    assert decoding["read_share"] == pytest.approx(share)
    assert chart.read_bytes().startswith(b"\x89PNG")


def _check_row(row: dict[str, object]) -> None:
    contenders, speedups = row["contenders"], row["speed_over"]
    assert isinstance(contenders, dict)
    assert isinstance(speedups, dict)
    for peer in ("xopt", "eager"):
        contender = contenders[peer]
        assert contender["status"] == "ok", (row["case"], contender)
        assert len(contender["turns_s"]) == 2
        assert 0 < contender["min_s"] <= contender["median_s"]
        assert 0 < contender["relative_error"] < 0.1
        assert contender["setup_s"] > 0
    ours, eager = contenders["xopt"], contenders["eager"]
    assert speedups["eager"]["minimum"] == pytest.approx(eager["min_s"] / ours["min_s"])
    assert speedups["eager"]["median"] == pytest.approx(eager["median_s"] / ours["median_s"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(dtype: str, crew: Crew) -> None:
    result = models.measure("gpt2 1x128", make_plan("eager", dtype=dtype), crew)
    assert [each.error for each in result.contenders] == [None, None]
    assert all(each.relative_error < 1e-2 for each in result.contenders)


def test_openvino_takes_a_decoder_but_no_cache(crew: Crew) -> None:
    pytest.importorskip("openvino")
    result = models.measure("gpt2 1x128", make_plan("openvino"), crew)
    assert result.contenders[1].error is None
    result = models.measure("llama-1.1b decode", make_plan("openvino"), crew)
    assert str(result.contenders[1].error).startswith("left out: a key-value cache")
    assert result.ours is not None


def test_a_contender_that_fails_is_named_and_the_run_goes_on(crew: Crew) -> None:
    result = models.measure("bert-base 1x128", make_plan("no such peer", "eager"), crew)
    assert result.ours is not None
    assert result.timed("no such peer") is None
    assert result.contenders[1].error == "KeyError: 'no such peer'"
    assert result.timed("eager") is not None
    plan = make_plan("no such peer", "eager")
    report = model_report.ModelReport(plan, load_before=0)
    report.add(result)
    status = report.document()["rows"][0]["contenders"]["no such peer"]["status"]
    assert status == "KeyError: 'no such peer'"
    assert f"NO TIME of no such peer in bert-base 1x128: {status}" in report.document()["notes"]


def test_a_process_that_dies_is_named_and_replaced() -> None:
    with Crew() as crew:
        worker = crew.get("eager")
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(ContenderError, match="its process was killed by SIGKILL"):
            worker.ask(do="read")
        contender = models.Contender(worker)
        assert contender.ask(do="read") is None
        assert not contender.goes_on
        again = crew.get("eager")
        assert again.pid != worker.pid
        assert again.ask(do="read")["bytes_per_second"] > 0


def test_what_a_process_said_last_is_told() -> None:
    worker = Worker("eager")
    try:
        with pytest.raises(ContenderError, match=r"its process ended with status 1: KeyError: 'do'"):
            worker.ask()
    finally:
        worker.close()


def test_no_process_is_left() -> None:
    worker = Worker("eager")
    assert is_running(worker.pid)
    worker.close()
    assert not is_running(worker.pid)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_bench_that_is_stopped(how: signal.Signals, tmp_path: pathlib.Path) -> None:
    arguments = ["models", "--size", "tiny", "--threads", "1", "--peers", "eager", "--rounds", "1000000"]
    bench = subprocess.Popen(
        [sys.executable, "-m", "xopt.bench", *arguments, "--cases", "bert-base 1x128"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    while len(workers := children(bench.pid)) < 2:
        assert bench.poll() is None
        time.sleep(0.01)
    bench.send_signal(how)
    assert bench.wait() == (130 if how == signal.SIGINT else -signal.SIGKILL)
    while any(is_running(worker) for worker in workers):
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    found = []
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "nothing"], "no case begins with 'nothing'"),
        (["--peers", "tensorflow"], "unknown peer 'tensorflow'"),
        (["--threads", "100000"], "--threads 100000: expected 1 to"),
        (["--rounds", "0"], "--rounds: got 0"),
        (["--json", "no/such/folder/x.json"], "--json: the folder of no/such/folder/x.json does not exist"),
        (["--png", "no/such/folder/x.png"], "--png: the folder of no/such/folder/x.png does not exist"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--list"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == list(CASES)


def measured(peer: str, *seconds: float, **more: float) -> Measured:
    made = Measured(peer, turns=[[each] for each in seconds])
    made.describe(more)
    return made


def test_speedups_of_made_up_times() -> None:
    result = CaseResult("", False, [measured("xopt", 1, 2, 3), measured("a", 3, 6, 9), measured("b", 2, 8, 8)])
    assert result.speedup("a") == (3, 3)
    assert result.speedup("b") == (2, 4)
    assert result.best_peer() == "b"
    assert CaseResult("", False, [Measured("xopt", error="x"), measured("a", 1)]).speedup("a") is None


def test_targets_of_made_up_times() -> None:
    plan = Plan(list(CASES), ["eager", "compile"], [], "bfloat16", [0, 1], 1, "full")
    ours = measured("xopt", 1, relative_error=1e-3, read_bytes=90)
    bert = CaseResult(
        "bert-base 1x128", False, [ours, measured("eager", 1.5, relative_error=1e-3), measured("compile", 3.5)]
    )
    decode = CaseResult("llama-1.1b decode", True, [ours, measured("compile", 1.4)], read_bytes_per_second=100)
    found = {(finding.what, finding.shape): finding for finding in summarize([bert, decode], plan)}
    outcomes = {
        (f"speed over {BEST} (eager)", bert.case): (1.5, 1.6, False),
        ("speed over compile", bert.case): (3.5, 3.28, True),
        ("relative error over that of eager", bert.case): (1.0, 1.1, True),
        (f"speed over {BEST} (compile)", decode.case): (1.4, 1.3, True),
        ("share of the read bandwidth", decode.case): (0.9, 0.85, True),
    }
    for key, (value, target, met) in outcomes.items():
        finding = found[key]
        assert (finding.value, finding.target, finding.met) == (pytest.approx(value), target, met), key


def test_wrong_results_get_no_time() -> None:
    exact = torch.randn(4, 4)
    assert relative_error(exact * 1.01, exact) == pytest.approx(0.01, rel=1e-3)
    for wrong in (-exact, exact * torch.nan, exact[:1]):
        with pytest.raises(WrongResultError, match="wrong result"):
            relative_error(wrong, exact)


def test_an_error_of_many_lines_becomes_one() -> None:
    said = "Check failed:\nModel was not converted.\n-- No rule for: aten::diff\n\nmore"
    assert essence(said) == "Check failed: -- No rule for: aten::diff"
    assert essence("") == ""


def test_choose_cpus_wants_as_many_as_there_are() -> None:
    with pytest.raises(BenchError):
        models.choose_cpus(0)
    assert len(models.choose_cpus(1)) == 1
