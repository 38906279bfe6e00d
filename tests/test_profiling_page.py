"""The report in a browser: a headless chromium draws it, and scripts of ours click in it."""

from __future__ import annotations

import dataclasses
import html
import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
import torch
from torch import nn

import xopt
from xopt.profiling import Profile
from xopt.profiling.result import Device

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser() -> str:
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("NOT RUN: there is no chromium to draw the profiler's report")
    return found


@pytest.fixture(scope="module")
def taken() -> Profile:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).eval()
    made = xopt.profile(model, torch.randn(2, 3, 8, 8), steps=2, warmup=1, roofs=False)
    made.roofs = {"f32": 1e11, "bf16": 2e11, "int8": 4e11, "read": 1e10, "copy": 9e9}
    made.notes.append("a note with </script><b>tags</b> and `code`")
    return made


def drawn(taken: Profile, folder: pathlib.Path, script: str = "", *options: str) -> str:
    """The page as the browser has it, after a script that stores what it found in `found`."""
    file = folder / "report.html"
    taken.to_html(file)
    store = "document.body.append(Object.assign(document.createElement('pre'), {id: 'found', textContent: found}));"
    page = file.read_text()
    file.write_text(page.replace("</body>", f"<script>{{ let found = ''; {script}; {store} }}</script></body>"))
    command = [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'user'}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=4000", *options, "--dump-dom", file.as_uri()], capture_output=True, text=True
    )
    assert 'data-drawn="yes"' in done.stdout, done.stderr[-2000:]
    return done.stdout


def found_by(script: str, taken: Profile, folder: pathlib.Path) -> Any:
    page = drawn(taken, folder, f"found = JSON.stringify({script})")
    match = re.search(r'<pre id="found">(.*?)</pre>', page, re.DOTALL)
    assert match is not None
    return json.loads(html.unescape(match[1]))


def test_the_page_stands_alone(taken: Profile, tmp_path: pathlib.Path) -> None:
    taken.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    outside = set(re.findall(r"https?://[^\s\"'<>)]+", page)) - {"http://www.w3.org/2000/svg"}
    assert not outside
    assert not re.search(r"<link|@import|\bsrc=|fetch\(|XMLHttpRequest|/\*(STYLE|SCRIPT|DATA)\*/", page)
    assert page.count("</script>") == 2  # text of the profile does not end the element that holds it


def test_each_part_is_drawn(taken: Profile, tmp_path: pathlib.Path) -> None:
    count = "[...document.querySelectorAll('{}')].length"
    places = {
        "rows": "#kernels tbody tr",
        "points": "#roofline circle",
        "parts": "#categories div",
        "pieces": "#timeline rect",
        "modules": "#modules .leaf",
        "findings": "#findings li",
        "errors": ".error",
    }
    script = "{" + ", ".join(f"{name}: {count.format(place)}" for name, place in places.items()) + "}"
    found = found_by(script, taken, tmp_path)
    assert found["rows"] == len(taken.kernels)
    assert found["parts"] == len(taken.categories)
    working = [
        kernel for kernel in taken.kernels if kernel.bytes and kernel.operator and kernel.category != "allocation"
    ]
    assert found["points"] == len(working)
    assert found["pieces"] > 0
    assert found["modules"] == 4
    assert found["findings"] == len(taken.findings) + len(taken.notes)


def test_kernels_of_a_device_have_a_table_of_their_own(taken: Profile, tmp_path: pathlib.Path) -> None:
    assert found_by("document.getElementById('devices').hidden", taken, tmp_path)
    kernels = [dataclasses.replace(kernel, name=f"of the device {place}") for place, kernel in enumerate(taken.kernels)]
    made = dataclasses.replace(taken, devices={"cuda:0": Device("A GPU", 0.0, {}, kernels)})
    script = """[...document.querySelectorAll("#devices h3, #devices td.name")].map((cell) => cell.textContent)"""
    assert found_by(script, made, tmp_path) == [
        "cuda:0 (A GPU), busy 0% of a step",
        *(kernel.name for kernel in kernels),
    ]


def test_the_table_is_sorted_and_filtered(taken: Profile, tmp_path: pathlib.Path) -> None:
    script = """(() => {
      const cells = (place) => [...document.querySelectorAll(`#kernels tbody td:nth-child(${place})`)];
      const column = (place) => cells(place).map((cell) => cell.textContent);
      const byTime = column(1);
      document.querySelector("#kernels th").click();
      const byName = column(1);
      const filter = document.getElementById("filter");
      filter.value = "CONV";
      filter.dispatchEvent(new Event("input"));
      const categories = column(3);
      filter.value = "";
      filter.dispatchEvent(new Event("input"));
      [...document.querySelectorAll("#kernels th")].find((cell) => cell.textContent === "FLOP").click();
      return [byTime, byName, categories, column(1)];
    })()"""
    by_time, by_name, categories, by_operations = found_by(script, taken, tmp_path)
    operations = {kernel.name: kernel.flop for kernel in taken.kernels}
    assert [operations[name] for name in by_operations] == sorted(operations.values(), reverse=True)
    assert operations[by_operations[0]] > operations[by_operations[-1]]
    assert by_time == [kernel.name for kernel in taken.kernels]
    assert sorted(by_name) == sorted(by_time)
    assert by_name != by_time
    assert "conv" in categories


def test_light_and_dark(taken: Profile, tmp_path: pathlib.Path) -> None:
    script = """(() => {
      const colours = () => [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor];
      const before = colours();
      document.getElementById("theme").click();
      return [before, colours()];
    })()"""
    before, after = found_by(script, taken, tmp_path)
    assert {before[0], after[0]} == {"light", "dark"}
    assert before[1] != after[1]
