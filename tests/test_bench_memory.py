"""The bench of the memory pool on a tiny model, from end to end. Nothing here depends on how fast the machine is."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.test_sanitizer import sanitizer_is_loaded
from xopt.bench import cli
from xopt.bench.memory import IN_PROCESS, MALLOC, PRELOADED, Comparison
from xopt.bench.model_results import Measured

pytest.importorskip("transformers")


@pytest.mark.skipif(sanitizer_is_loaded(), reason="NOT RUN: a sanitizer brings a malloc of its own")
def test_measures_and_reports(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "memory.json"
    chosen = ["--cases", "bert-base 1x128", "--models", "xopt", "--dtypes", "bfloat16", "--threads", "1"]
    assert cli.main(["memory", *chosen, "--rounds", "2", "--size", "tiny", "--json", str(data)]) == 0
    (row,) = json.loads(data.read_text())["rows"]
    assert (row["case"], row["model"], row["dtype"]) == ("bert-base 1x128", "xopt", "bfloat16")
    assert {each["peer"]: each["note"] for each in row["allocators"]} == {
        MALLOC: "",
        PRELOADED: "preload",
        IN_PROCESS: "glibc",
    }
    for each in row["allocators"]:
        assert len(each["turns"]) == 2
        assert all(seconds > 0 for turn in each["turns"] for seconds in turn)
        assert [len(turn) for turn in each["turns"]] == [len(turn) for turn in each["page_faults"]]
    said = capsys.readouterr().out
    assert "page faults a forward" in said
    assert "the times mean nothing" in said


def test_what_is_slower_than_malloc_is_named() -> None:
    times = {MALLOC: (1.0, 2.0), "a": (1.05, 2.2), "b": (0.5, 3.0), "c": (1.2, 2.0)}
    measured = [
        Measured(name, turns=[[seconds, 9.0]], cpu_seconds=[[cpu_seconds]])
        for name, (seconds, cpu_seconds) in times.items()
    ]
    compared = Comparison("unet", "eager", "float32", [*measured, Measured("d", error="died")])
    assert compared.speed(measured[2]) == 2
    assert compared.too_slow() == ["unet, eager, float32: a, 0.95"]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (["--rounds", "0"], "--rounds: got 0, expected at least 1"),
        (["--models", "compile"], "--models: got 'compile', expected of: eager, xopt"),
        (["--dtypes", "int8"], "--dtypes: got 'int8', expected of: float32, bfloat16, float16"),
        (["--cases", "no such"], "no case begins with 'no such'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(chosen: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", *chosen]) == 2
    assert said in capsys.readouterr().err
