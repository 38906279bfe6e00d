"""Every example runs, on its smallest size."""

from __future__ import annotations

import pathlib

import pytest

from tests import fresh_process

EXAMPLES = sorted((pathlib.Path(__file__).parent.parent / "examples").glob("*.py"))
SMALL = {
    "bert_bf16.py": ["--size", "tiny", "--tokens", "16", "--rounds", "1"],
    "lstm_tagger.py": ["--size", "tiny", "--words", "9", "--rounds", "1"],
    "multi_instance.py": ["--size", "tiny", "--tokens", "16", "--seconds", "0.1"],
    "multi_stream.py": ["--size", "32", "--batch", "3", "--rounds", "1"],
    "resnet50_bf16.py": ["--size", "tiny", "--batch", "2", "--rounds", "1"],
    "profile_model.py": ["--size", "tiny", "--steps", "2"],
    "resnet50_fp32.py": ["--size", "tiny", "--rounds", "1"],
    "stable_diffusion_unet.py": ["--size", "tiny", "--steps", "2"],
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_runs(example: pathlib.Path) -> None:
    for library in ("transformers", "diffusers"):
        if library in example.read_text():
            pytest.importorskip(library)
    finished = fresh_process.run(str(example), *SMALL.get(example.name, []))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout
