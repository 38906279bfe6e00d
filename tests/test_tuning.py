"""Autotuning: that no choice changes results, that only clear winners are chosen, and what is kept on disk. No test
knows how fast the machine is."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pathlib
import pickle
import random
import sqlite3
import textwrap
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import xopt
from tests import families, fresh_process
from xopt import _C, tuning
from xopt.bench import cli
from xopt.tuning import store as store_file
from xopt.tuning.store import Store
from xopt.tuning.tuned import DEFAULT, Tuned

CASES = 60
TUNABLE = (
    "linear",
    "linear_gated",
    "linear_norm",
    "qlinear",
    "conv",
    "qconv",
    "conv_transpose",
    "attention",
    "weight_only",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("xopt.tuning.scope._was_read", False)
    _C.forget_tuned()
    yield
    _C.forget_tuned()


def any_choice(rng: random.Random) -> list[int]:
    """Of what `csrc/runtime/tuning.h` has, in any combination."""
    level = rng.choice([-1, *range(_C.isa_levels().index(_C.active_isa()) + 1)])
    return [level, rng.randint(0, 8), rng.randint(0, 2), rng.randint(0, 4), rng.randint(0, 2), rng.randint(0, 2)]


@pytest.mark.sanitize
@pytest.mark.parametrize("name", TUNABLE)
def test_no_choice_changes_results_beyond_the_kernels_tolerance(name: str) -> None:
    """The same cases, tolerances and references that the operators' own tests have."""
    family, rng = families.find_family(name), random.Random(name)
    for case in family.cases(17, CASES):
        choice = any_choice(rng)
        with tuning.forced(choice):
            try:
                family.run(case)
            except families.CaseFailure as failure:
                raise AssertionError(f"by the choice {choice}: {failure}") from failure


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("gemm", "f32"), ("gemm", "s8s8"), ("conv", "bf16"), ("attention", "bf16"), ("conv_depthwise", "u8s8")],
)
def test_candidates_are_all_different_and_run(kernel: str, dtype: str) -> None:
    found = _C.tuning_candidates(kernel, dtype, 4)
    texts, choices = [text for text, _ in found], [tuple(choice) for _, choice in found]
    assert len(set(choices)) == len(choices) == len(set(texts)) > 5
    assert DEFAULT not in choices
    levels = {record["isa"] for record in _C.kernels() if (record["name"], record["dtype"]) == (kernel, dtype)}
    below = levels - {"scalar", _C.find_kernel(kernel, dtype)}
    usable = _C.isa_levels()[: _C.isa_levels().index(_C.active_isa()) + 1]
    assert {text for text in texts if text in levels} == below & set(usable)


def test_long_sums_and_many_rows_are_right_by_each_candidate() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 2500), torch.randn(330, 2500)
    packed = torch.ops.xopt.linear_pack(weight, dtype=torch.float32)
    expected = x.double() @ weight.double().t()
    for text, choice in _C.tuning_candidates("gemm", "f32", torch.get_num_threads()):
        with tuning.forced(choice):
            error = (torch.ops.xopt.linear(x, packed, 330) - expected).norm() / expected.norm()
        assert error < 1e-6, text


# ---- What is chosen --------------------------------------------------------------------------------------------------


def test_only_what_is_clearly_faster_is_chosen() -> None:
    candidates = _C.tuning_candidates("gemm", "f32", 1)
    (text, first), (_, second) = candidates[-1], candidates[-2]
    usual = _C.find_kernel("gemm", "f32")
    slow, fast = 4e-3, 1e-3
    assert _C.testing.tune_waits([(list(DEFAULT), slow), (first, fast), (second, slow * 2)]) == text
    assert _C.testing.tune_waits([(list(DEFAULT), fast), (first, slow), (second, slow)]) == usual
    assert _C.testing.tune_waits([(list(DEFAULT), slow), (first, slow), (second, slow)]) == usual
    winner, *others = [Tuned.of_row(row) for row in _C.tuned_calls()]
    assert winner.gain > 1.5
    assert all(other.is_default and other.gain == 1 for other in others)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval()


def test_off_nothing_is_tried_or_noted() -> None:
    optimized = xopt.optimize(model())
    optimized(torch.randn(8, 64))
    optimized(torch.randn(8, 64))
    assert not _C.tuned_calls()
    assert not xopt.report(optimized).tuned


def test_tune_finds_each_shape_once_and_the_report_says_what_runs() -> None:
    optimized, x = xopt.optimize(model()), torch.randn(8, 64)
    expected = optimized(x)
    report = xopt.tune(optimized, x)
    sizes = {(each.kernel, each.dtype, each.size, each.threads) for each in report.tuned}
    threads = _C.max_threads()
    assert sizes == {("gemm", "f32", "8x96x64", threads), ("gemm", "f32", "8x64x96", threads)}
    assert f"gemm[f32] {_C.find_kernel('gemm', 'f32')}" in report.defaults
    assert "Of 2 shapes that were tuned" in str(report)
    torch.testing.assert_close(optimized(x), expected)
    optimized(torch.randn(9, 64))  # a shape that was not asked for
    assert len(_C.tuned_calls()) == 2
    with pytest.raises(ValueError, match="expected what"):
        xopt.tune(nn.Linear(2, 2), x)


def test_a_configured_model_is_tuned_at_its_first_calls_and_others_are_not() -> None:
    tuned, other = (xopt.optimize(model(), config=xopt.Config(autotune=mode)) for mode in ("max", "off"))
    other(torch.randn(3, 64))
    assert not _C.tuned_calls()
    for _ in range(2):
        tuned(torch.randn(3, 64))
    assert {each.size for each in xopt.report(tuned).tuned} >= {"3x96x64", "3x64x96"}
    count = len(_C.tuned_calls())
    other(torch.randn(5, 64))
    assert len(_C.tuned_calls()) == count
    tuned(torch.randn(5, 64))
    assert len(_C.tuned_calls()) > count


def test_the_chosen_instance_runs_and_the_profile_names_it() -> None:
    if _C.find_kernel("gemm", "f32") in ("scalar", "avx2"):
        pytest.skip("NOT RUN: there is no lower level of vectors")
    optimized, x = xopt.optimize(model()), torch.randn(8, 64)
    xopt.tune(optimized, x)
    below = [_C.isa_levels().index("avx2"), 2, 0, 0, 0, 0]
    for each in tuning.known():
        key = each.kernel, each.dtype, each.level, each.threads, list(each.sizes)
        _C.add_tuned(*key, below, 1.0, 2.0)
    _C.reset_kernel_calls()
    optimized(x)
    calls = families.kernel_calls()
    assert calls["gemm f32 avx2"] == 2
    assert not calls[f"gemm f32 {_C.find_kernel('gemm', 'f32')}"]
    assert [each.instance for each in xopt.report(optimized).tuned] == ["avx2, 2 panels"] * 2
    assert "avx2, 2 panels" in str(xopt.report(optimized))
    taken = xopt.profile(optimized, x, steps=1, warmup=1, roofs=False)
    names = {kernel.name for kernel in taken.kernels}
    assert {"linear[f32,avx2, 2 panels]+bias+gelu_erf 8x96x64", "linear[f32,avx2, 2 panels]+bias 8x64x96"} <= names


def test_products_inside_a_parallel_region_are_left_alone() -> None:
    layer = xopt.optimize(nn.LSTM(32, 32).eval(), config=xopt.Config(autotune="max"))
    layer(torch.randn(5, 3, 32))
    assert not _C.tuned_calls()


def test_convolutions_are_tuned_and_have_their_sizes() -> None:
    optimized = xopt.optimize(nn.Conv2d(8, 16, 3, stride=2, padding=1).eval(), config=xopt.Config(autotune="max"))
    optimized(torch.randn(2, 8, 10, 12))
    (found,) = xopt.report(optimized).tuned
    assert (found.kernel, found.size) == ("conv", "2x8x1x10x12, 1x3x3/1x2x2 to 16")


def test_copies_and_files_keep_what_was_asked_for() -> None:
    tuned = xopt.optimize(model(), config=xopt.Config(autotune="max"))
    x = torch.randn(4, 64)
    expected = tuned(x)
    buffer = io.BytesIO()
    torch.save(tuned, buffer)
    buffer.seek(0)
    for other in (
        *(copy.deepcopy(tuned), pickle.loads(pickle.dumps(tuned))),
        torch.load(buffer, weights_only=False),
    ):
        _C.forget_tuned()
        torch.testing.assert_close(other(x), expected)
        assert _C.tuned_calls()


def test_a_tuned_model_compiles(tmp_path: pathlib.Path) -> None:
    program = """
        import torch, xopt
        from torch import nn

        model = xopt.optimize(nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval(), config=xopt.Config(autotune="max"))
        x = torch.randn(4, 32)
        with torch.no_grad():
            expected = model(x)
            torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), expected)
        print("fine")
    """
    assert fresh_process.output_of(program, XDG_CACHE_HOME=str(tmp_path)).endswith("fine")


# ---- On disk ---------------------------------------------------------------------------------------------------------


def tuned_call(size: int, **changes: Any) -> Tuned:
    one = Tuned("gemm", "f32", "avx2", 1, (size, 2, 3, 0, 0, 0), (1, 4, 0, 0, 0, 0), "avx2, 4 panels", 1.0, 2.0)
    return dataclasses.replace(one, **changes)


def test_what_is_written_is_read_and_the_newest_wins(tmp_path: pathlib.Path) -> None:
    kept = Store(tmp_path / "tuning.sqlite")
    assert kept.read() == []
    kept.write([tuned_call(1), tuned_call(2)])
    kept.write([tuned_call(2, seconds=0.5), tuned_call(2, threads=2)])
    assert kept.read() == [tuned_call(1), tuned_call(2, seconds=0.5), tuned_call(2, threads=2)]
    assert kept.clear() == 3
    assert kept.read() == []


def test_other_machines_and_versions_are_kept_apart(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Store(tmp_path / "tuning.sqlite")
    kept.write([tuned_call(1)])
    with monkeypatch.context() as patched:
        patched.setattr(store_file, "machine_identity", lambda: "another machine")
        assert kept.read() == []
        kept.write([tuned_call(1, seconds=3.0)])
    assert kept.read() == [tuned_call(1)]
    assert len(kept.entries()) == 2
    newer = dataclasses.replace(xopt.capabilities(), xopt_version="99")
    monkeypatch.setattr(store_file, "capabilities", lambda: newer)
    assert kept.read() == []


def test_the_file_is_bounded_and_the_oldest_go_first(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "MOST_ENTRIES", 3)
    kept = Store(tmp_path / "tuning.sqlite")
    for size in range(5):
        kept.write([tuned_call(size)])
    assert kept.read() == [tuned_call(size) for size in (2, 3, 4)]


@pytest.mark.parametrize("content", ["no database", "another database", "cut off"])
def test_a_damaged_file_is_replaced_and_said_so(tmp_path: pathlib.Path, content: str) -> None:
    kept = Store(tmp_path / "tuning.sqlite")
    if content == "another database":
        with sqlite3.connect(kept.path) as connection:
            connection.execute("CREATE TABLE tuned (something TEXT)")
    else:
        kept.write([tuned_call(size) for size in range(200)])
        whole = kept.path.read_bytes()
        kept.path.write_bytes(b"x" * 5000 if content == "no database" else whole[: len(whole) // 2])
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert kept.read() == []
    kept.write([tuned_call(1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept.read() == [tuned_call(1)]
    assert kept.path.with_suffix(".damaged").exists()


def test_a_folder_that_cannot_be_used_is_said_and_nothing_fails(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Store(tmp_path / "file" / "tuning.sqlite")
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        kept.write([tuned_call(1)])
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert kept.read() == []


def test_a_damaged_file_that_cannot_be_put_aside_is_said_and_nothing_fails(tmp_path: pathlib.Path) -> None:
    kept = Store(tmp_path / "tuning.sqlite")
    kept.path.write_bytes(b"x" * 5000)
    (tmp_path / "tuning.damaged" / "in the way").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert kept.read() == []


@pytest.mark.filterwarnings("ignore:xopt.*is damaged")
def test_a_damaged_file_is_put_aside_once_nobody_has_it_open(tmp_path: pathlib.Path) -> None:
    kept = Store(tmp_path / "tuning.sqlite")
    aside = kept.path.with_suffix(".damaged")
    in_use, used = threading.Event(), threading.Event()

    def use(_: sqlite3.Connection) -> bool:
        in_use.set()
        return used.wait()

    user = threading.Thread(target=kept._use, args=(use, False))
    finder = threading.Thread(target=kept.read)
    user.start()
    in_use.wait()
    kept.path.write_bytes(b"x" * 5000)
    finder.start()
    finder.join(0.2)
    put_aside_while_in_use = aside.exists()
    used.set()
    user.join()
    finder.join()
    assert not put_aside_while_in_use
    assert aside.exists()


_WRITERS = """
    import os, pathlib, sys
    from xopt.tuning.store import Store
    from tests.test_tuning import tuned_call

    writers = []
    for first in range(0, 400, 100):
        writers.append(os.fork())
        if writers[-1] == 0:
            break
    else:
        sys.exit(any([os.waitpid(writer, 0)[1] for writer in writers]))
    kept = Store(pathlib.Path(sys.argv[1]))
    for number in range(25):
        kept.write([tuned_call(first + number)])
        assert tuned_call(first + number) in kept.read()
"""


def test_processes_write_at_the_same_time(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tuning.sqlite"
    path.write_bytes(b"damaged from the start" * 100)
    done = fresh_process.run("-c", textwrap.dedent(_WRITERS), str(path))
    assert done.returncode == 0, done.stderr
    assert len(Store(path).read()) == 100


_TUNES = """
    import torch, xopt
    from torch import nn
    from xopt import _C

    torch.manual_seed(0)
    model = xopt.optimize(nn.Sequential(nn.Linear(64, 96), nn.GELU()).eval())
    report = xopt.tune(model, torch.randn(8, 64))
    print(len(report.tuned), len(_C.take_fresh_tuned()), report.tuned[0].seconds)
"""


def test_a_later_process_takes_over_what_was_found(tmp_path: pathlib.Path) -> None:
    first, second = (fresh_process.output_of(_TUNES, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2))
    assert first == second  # the very same measurement, and no new one
    assert first.startswith("1 0 ")


def test_the_environment_tunes_a_whole_process(tmp_path: pathlib.Path) -> None:
    program = """
        import torch, xopt
        packed = torch.ops.xopt.linear_pack(torch.randn(32, 32), dtype=torch.float32)
        torch.ops.xopt.linear(torch.randn(4, 32), packed, 32)
        print([each.size for each in xopt.tuning.known()])
    """
    environment = {"XDG_CACHE_HOME": str(tmp_path), "XOPT_AUTOTUNE": "max"}
    assert fresh_process.output_of(program, **environment) == "['4x32x32']"
    listed = fresh_process.run("-m", "xopt", "cache", "--json", **environment)
    entries = json.loads(listed.stdout)["entries"]
    assert [entry["tuned"]["sizes"][:3] for entry in entries] == [[4, 32, 32]]
    table = fresh_process.run("-m", "xopt", "cache", **environment).stdout
    assert "1 entries" in table
    assert "gemm[f32]" in table
    assert "1 entries cleared" in fresh_process.run("-m", "xopt", "cache", "clear", **environment).stdout
    assert json.loads(fresh_process.run("-m", "xopt", "--json", "cache", **environment).stdout)["entries"] == []
    refused = fresh_process.run("-c", "import xopt", XOPT_AUTOTUNE="min")
    assert refused.returncode != 0
    assert "XOPT_AUTOTUNE: expected one of off, max, got 'min'" in refused.stderr


def test_wrong_choices_and_modes_are_named() -> None:
    with pytest.raises(ValueError, match="autotune: expected one of off, max, got 'min'"):
        xopt.Config(autotune="min")
    with pytest.raises(ValueError, match="known modes: off, use, max"):
        _C.enter_tuning("min")
    with pytest.raises(ValueError, match="choice: expected"):
        _C.force_tuning([1, 2])


def test_the_bench_compares_heuristics_with_what_is_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert cli.main(["tuning", "--size", "tiny", "--cases", "bert-base 1x128", "--seconds", "0"]) == 0
    shown = capsys.readouterr().out
    assert "heuristics ms" in shown
    assert "bert-base 1x128" in shown
    assert cli.main(["tuning", "--threads", "0"]) == 2
