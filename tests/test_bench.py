"""The bench: its arithmetic on made-up times, its refusal to time what is wrong, and one small run from end to end.

Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import fresh_process
from xopt import _C, roofs
from xopt.bench import cli, conv_peers, kernels, peers, plot, report, results, shapes, turns
from xopt.bench.errors import UnavailableError, WrongResultError
from xopt.bench.problem import EPILOGUES, Problem, check_result, in_bf16, make_problem, make_weight
from xopt.bench.results import Case, Finding, Ratio
from xopt.bench.rotation import LARGEST_SET, Caches, Rotation, outputs_kept_mapped, plan_rotation
from xopt.bench.shapes import Shape, parse_shape
from xopt.bench.turns import Timing
from xopt.roofs import KINDS, Roof, Roofs, higher_of

MIB = 1 << 20
ROOFS = Roofs(
    threads=2,
    by_kind={
        "f32": Roof(100e9, "made-up FMA"),
        "bf16": Roof(1000e9, "made-up AMX"),
        "int8": Roof(2000e9, "made-up AMX"),
        "read": Roof(10e9, "made-up read"),
    },
)


QUIET = report.Setting(load_before=0.0, least_rounds=3, seconds=0.1)


def timing(*samples: float) -> Timing:
    return Timing(min(samples), sorted(samples)[len(samples) // 2], samples, calls=1)


def made_up_case(dtype: str, shape: str, bytes_moved: int = 1, **seconds: float) -> Case:
    names = {
        "ours": peers.OURS,
        "onednn": peers.ONEDNN,
        "mkl": peers.MKL,
        "eager": peers.EAGER,
        "gelu": peers.OURS_BIAS_GELU,
        "residual": peers.OURS_BIAS_RESIDUAL,
        "bf16": peers.OURS_BF16,
    }
    timings = {names[name]: timing(value, 2 * value) for name, value in seconds.items()}
    return Case(dtype, parse_shape(shape), bytes_moved, Rotation(2, 100 * MIB, "memory"), timings)


def finding(findings: list[Finding], dtype: str, what: str) -> Finding:
    found = [one for one in findings if one.dtype == dtype and one.what == what]
    assert len(found) == 1, f"{dtype}, {what}: {[one.what for one in findings]}"
    return found[0]


# ---- Arithmetic -----------------------------------------------------------------------------------------------------


def test_ratio_is_of_minima_and_of_the_rounds() -> None:
    case = made_up_case("bf16", "1x2x3")
    case.timings[peers.OURS] = timing(1.0, 2.0, 4.0)
    case.timings[peers.ONEDNN] = timing(3.0, 3.0, 4.0)
    assert results.ratio(case, peers.OURS, peers.ONEDNN) == Ratio(minimum=3.0, median=1.5)
    assert results.ratio(case, peers.OURS, peers.MKL) is None


def test_roofs() -> None:
    assert ROOFS.peak_share("bf16", flop=2e9, seconds=0.004) == pytest.approx(0.5)
    assert ROOFS.read_share(moved_bytes=1e9, seconds=0.2) == pytest.approx(0.5)
    assert ROOFS.attainable("bf16", 10) == pytest.approx(100e9)
    assert ROOFS.attainable("bf16", 1e6) == pytest.approx(1000e9)
    lower = Roofs(2, {kind: Roof(1e9 if kind != "f32" else 200e9, "other") for kind in KINDS})
    merged = higher_of(ROOFS, lower)
    assert merged.by_kind["f32"] == lower.by_kind["f32"]
    assert all(merged.by_kind[kind] == ROOFS.by_kind[kind] for kind in ("bf16", "int8", "read"))


def test_summary_against_the_targets() -> None:
    flop = parse_shape("1024x1000x1000").flop
    cases = [
        made_up_case("bf16", "1024x1000x1000", ours=flop / 700e9, onednn=2 * flop / 700e9, gelu=1.05 * flop / 700e9),
        made_up_case("bf16", "1x1000x1000", bytes_moved=8_000_000, ours=0.001, onednn=0.0009, gelu=0.0013),
        made_up_case("int8", "512x1000x1000", ours=1.0, onednn=1.3, bf16=1.5),
        made_up_case("f32", "128x768x768", ours=1.0, onednn=1.2, mkl=0.9, eager=4.0),
    ]
    findings = results.summarize(cases, ROOFS)
    speed = finding(findings, "bf16", "speed over oneDNN prepacked, geometric mean")
    assert speed.value == pytest.approx(math.sqrt(2 * 0.9))
    assert speed.met is True
    assert speed.shapes == 2
    worst = finding(findings, "bf16", "speed over oneDNN prepacked, worst shape")
    assert (worst.value, worst.shape, worst.met) == (pytest.approx(0.9), "1x1000x1000", False)
    peak = finding(findings, "bf16", "share of the peak, M >= 1024, lowest")
    assert (peak.value, peak.met) == (pytest.approx(0.7), True)
    read = finding(findings, "bf16", "share of the read bandwidth, M <= 4, lowest")
    assert (read.value, read.met) == (pytest.approx(0.8), False)
    cost = finding(findings, "bf16", "cost of bias + gelu, K >= 768, worst shape")
    assert (cost.value, cost.met) == (pytest.approx(0.3), False)
    assert finding(findings, "int8", "speed over our bf16, M >= 512, geometric mean").met is False
    best = finding(findings, "f32", "speed over the faster of oneDNN and MKL, geometric mean")
    assert (best.value, best.met) == (pytest.approx(0.9), False)
    assert finding(findings, "f32", "speed over F.linear, geometric mean").value == pytest.approx(4.0)


def test_read_share_leaves_out_weights_that_a_cache_held() -> None:
    case = made_up_case("bf16", "1x1000x1000", ours=1.0)
    cached = dataclasses.replace(case, rotation=Rotation(2, MIB, "last-level cache"))
    assert not any("read bandwidth" in one.what for one in results.summarize([cached], ROOFS))


def test_rotation() -> None:
    small = plan_rotation(MIB, Caches(l2_bytes=2 * MIB, last_level_bytes=30 * MIB), threads=2)
    assert small == Rotation(copies=60, set_bytes=60 * MIB, source="memory")
    capped = plan_rotation(MIB, Caches(l2_bytes=2 * MIB, last_level_bytes=1024 * MIB), threads=2)
    assert (capped.set_bytes, capped.source) == (LARGEST_SET, "last-level cache")
    many_cores = plan_rotation(MIB, Caches(l2_bytes=2 * MIB, last_level_bytes=30 * MIB), threads=64)
    assert many_cores.set_bytes == 256 * MIB
    large = plan_rotation(1000 * MIB, Caches(l2_bytes=MIB, last_level_bytes=30 * MIB), threads=1)
    assert large.copies == 2


# ---- Shapes and options ---------------------------------------------------------------------------------------------


def test_shapes() -> None:
    everything = shapes.all_shapes()
    layers = {(shape.n, shape.k) for shape in everything}
    assert len(everything) == len(set(everything)) == len(layers) * len(shapes.ROWS)
    assert {"4096x4096x4096", "512x4096x1024", "197x3072x768", "1x14336x4096", "16x512x2048"} <= set(
        map(str, everything)
    )
    assert shapes.parse_shapes("2x3x4,1x3x4,2x3x4") == [Shape(3, 4, 1), Shape(3, 4, 2)]
    assert parse_shape("2x3x4").flop == 48


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "1x2"], "'1x2' is not a shape"),
        (["--shapes", "1x0x2"], "'1x0x2' is not a shape"),
        (["--shapes", ","], "no shape"),
        (["--dtype", "f32,f64"], "f32, bf16, int8"),
        (["--threads", "0"], "--threads"),
        (["--rounds", "0"], "--rounds"),
        (["--json", "/no/such/folder/a.json"], "/no/such/folder/a.json does not exist"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_matplotlib_is_said_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["kernels", "--plot", "a.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_commands_are_found_by_themselves() -> None:
    assert {"kernels", "roofs"} <= set(cli.find_commands())


# ---- Turns and checks -----------------------------------------------------------------------------------------------


def test_contenders_take_turns_and_weights_rotate() -> None:
    heard: list[str] = []

    def caller(name: str) -> Callable[[int], None]:
        return lambda weight: heard.append(f"{name}{weight}")

    runners = [turns.make_runner(name, caller(name), [0, 1, 2]) for name in "AB"]
    for runner in runners:
        runner.calls = 2
    turns.take_turns(runners, least_rounds=3, seconds=0)
    assert heard == ["A0", "A1", "B0", "B1", "A2", "A0", "B2", "B0", "A1", "A2", "B1", "B2"]
    assert [len(runner.samples) for runner in runners] == [3, 3]


def all_dtypes_and_epilogues() -> Iterator[tuple[str, str]]:
    return ((dtype, epilogue) for dtype in shapes.DTYPES for epilogue in EPILOGUES)


def problem_of(dtype: str, shape: str) -> Problem:
    wanted = parse_shape(shape)
    return make_problem(make_weight(dtype, wanted.n, wanted.k), wanted)


def right_result(problem: Problem, epilogue: str) -> torch.Tensor:
    left, right = problem.input.double(), problem.weight.values.double()
    if problem.dtype == "int8":
        left = (left - problem.input_zero_point) * problem.input_scale.double()
        right = right * problem.weight.scale.double().unsqueeze(1)
    result = left @ right.t()
    if epilogue != "none":
        result = result + problem.weight.bias.double()
    if epilogue == "bias_gelu":
        result = torch.nn.functional.gelu(result)
    elif epilogue == "bias_residual":
        result = result + problem.residual.double()
    return result.to(problem.output_dtype)


@pytest.mark.parametrize(("dtype", "epilogue"), list(all_dtypes_and_epilogues()))
def test_only_right_results_pass_the_check(dtype: str, epilogue: str) -> None:
    problem = problem_of(dtype, "5x48x70")
    result = right_result(problem, epilogue)
    check_result(problem, result, epilogue)
    for spoil in (lambda x: x * 1.05, lambda x: x.roll(1, 0), lambda x: x.roll(1, 1), torch.zeros_like):
        with pytest.raises(WrongResultError, match="5x48x70: off by"):
            check_result(problem, spoil(result), epilogue)
    poisoned = result.clone()
    poisoned[3, 7] = math.nan
    with pytest.raises(WrongResultError, match="not finite"):
        check_result(problem, poisoned, epilogue)
    with pytest.raises(WrongResultError, match="expected"):
        check_result(problem, result[:, :-1], epilogue)


def test_operands_are_random() -> None:
    for dtype in shapes.DTYPES:
        problem = problem_of(dtype, "5x48x70")
        assert problem.input.double().std() > 0.5
        assert problem.weight.values.double().std() > 0.5
    assert in_bf16(problem).weight.dtype == "bf16"


def test_a_broken_contender_gets_no_time() -> None:
    plan = kernels.Plan([parse_shape("4x32x32")], ["f32"], threads=1, least_rounds=2, seconds=0)
    eager = next(one for one in peers.ALL if one.name == peers.EAGER)

    def unavailable(weight: object, m: int) -> object:
        raise UnavailableError("no such op")

    def failing(weight: object, m: int) -> object:
        raise RuntimeError("could not create a primitive")

    broken = [
        dataclasses.replace(eager, name="wrong", bind=lambda problem: lambda weight: problem.input @ weight.t() + 1),
        dataclasses.replace(eager, name="missing", pack=unavailable, layout="missing"),
        dataclasses.replace(eager, name="failing", pack=failing, layout="failing"),
    ]
    case = kernels.measure(plan, lambda dtype, shape: [eager, *broken])[0]
    assert set(case.timings) == {peers.EAGER}
    assert len(case.timings[peers.EAGER].samples) == 2
    assert case.failures["wrong"].startswith("wrong result: 4x32x32: off by")
    assert case.failures["missing"] == "not available: no such op"
    assert case.failures["failing"] == "failed: RuntimeError: could not create a primitive"
    assert any("missing not available: no such op" in line for line in report.notes([case], QUIET))


def test_a_busy_machine_is_said() -> None:
    case = made_up_case("bf16", "1x1000x1000", ours=1.0)
    busy = dataclasses.replace(QUIET, load_before=1000.0)
    assert "busy" in report.notes([case], busy)[0]
    assert not any("busy" in line for line in report.notes([case], QUIET))


def test_memory_setting_is_a_scope() -> None:
    with outputs_kept_mapped():
        assert torch.ones(1 << 24).sum() == 1 << 24


# ---- The native probes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", _C.isa_levels())
def test_probes_run_on_every_level(level: str) -> None:
    if _C.isa_levels().index(level) > _C.isa_levels().index(_C.detected_isa()):
        pytest.skip(f"NOT RUN: this machine has no {level}")
    program = """
        import json, xopt
        kinds = ("f32", "bf16", "int8", "read")
        probes = {(kind, threads): xopt._C.probe(kind, threads, 1) for kind in kinds for threads in (1, 2)}
        assert all(seconds > 0 and work > 0 and instruction for seconds, work, instruction in probes.values()), probes
        for kind in ("f32", "bf16", "int8"):
            assert probes[kind, 2][1] == 2 * probes[kind, 1][1], kind
        assert all(probes["read", threads][1] >= 256 << 20 for threads in (1, 2))
        called = {k.dtype: k.calls for k in xopt.kernels() if k.name == "probe" and k.chosen}
        assert called == dict.fromkeys(kinds, 2), called
        print("probed")
    """
    assert fresh_process.output_of(program, XOPT_MAX_ISA=level) == "probed"


def test_probe_names_what_is_wrong() -> None:
    with pytest.raises(RuntimeError, match="f64"):
        _C.probe("f64", 1, 1)
    with pytest.raises(ValueError, match="threads is 0"):
        _C.probe("f32", 0, 1)
    with pytest.raises(ValueError, match="repeats is 0"):
        _C.probe("f32", 1, 0)


# ---- End to end -----------------------------------------------------------------------------------------------------

CONVS = ("8x9x7:64x3x3/2", "64x8x8:64x1x1+")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pathlib.Path]:
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.png")]
    shape_list = "1x48x768,512x48x768,1024x96x64"
    convs = ["--convs", ",".join(CONVS), "--batch", "2"]
    measured = ["--shapes", shape_list, *convs, "--rounds", "1"]
    said, threads = io.StringIO(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(said):
        # Short turns, and few weights that take turns: times mean nothing here.
        patched.setattr(kernels, "QUICK_SECONDS", 0)
        patched.setattr(kernels, "known_caches", lambda: Caches(l2_bytes=MIB // 4, last_level_bytes=MIB))
        patched.setattr(roofs, "REGISTER_REPEATS", 2)
        patched.setattr(roofs, "READ_REPEATS", 1)
        status = cli.main(["kernels", "--quick", *measured, *files])
    torch.set_num_threads(threads)
    assert status == 0, said.getvalue()
    return said.getvalue(), folder


def onednn_has(dtype: str) -> bool:
    try:
        peers.require_onednn(dtype)
    except UnavailableError:
        return False
    return True


def test_run_prints_the_table(small_run: tuple[str, pathlib.Path]) -> None:
    output, _ = small_run
    for shape in ("1x48x768", "512x48x768", "1024x96x64"):
        assert output.count(f" {shape} ") >= 3, f"{shape} is not there once a dtype"
    for conv in CONVS:
        assert output.count(f" 2x{conv} ") >= 2, f"{conv} is not there once a dtype"
    for word in (
        *peers.PEERS,
        "of peak",
        "of read",
        "Summary",
        *(("at least 1.30x",) if onednn_has("bf16") else ()),
        "no int8 form",
        "Weights rotate over",
    ):
        assert word in output, word


def test_run_writes_json(small_run: tuple[str, pathlib.Path]) -> None:
    document = json.loads((small_run[1] / "run.json").read_text())
    assert document["kind"] == "kernels"
    assert document["machine"]["cpu"]
    assert document["versions"]["torch"] == torch.__version__
    assert document["threads"] >= 1
    assert set(document["roofs"]) == set(KINDS)
    assert any(kernel["name"] == "gemm" and kernel["dtype"] == "bf16" for kernel in document["kernels"])
    assert len(document["rows"]) == 9
    expected = {
        "f32": {peers.ONEDNN, peers.MKL, peers.EAGER},
        "bf16": {peers.ONEDNN, peers.EAGER},
        "int8": {peers.ONEDNN},
    }
    for row in document["rows"]:
        assert row["flop"] == 2 * row["m"] * row["n"] * row["k"]
        assert row["weight_copies"] >= 2
        contenders = row["contenders"]
        assert {peers.OURS, *peers.FUSED, *expected[row["dtype"]]} <= set(contenders)
        ours = contenders[peers.OURS]
        assert ours["status"] == "ok"
        assert ours["tflops"] == pytest.approx(row["flop"] / ours["min_s"] / 1e12)
        peak = document["roofs"][row["dtype"]]["per_second"]
        assert ours["peak_share"] == pytest.approx(row["flop"] / ours["min_s"] / peak)
        assert ours["gb_per_s"] == pytest.approx(row["bytes"] / ours["min_s"] / 1e9)
        assert ours["median_s"] >= ours["min_s"]
        for other, speed in row["speed_over"].items():
            assert speed["minimum"] == pytest.approx(contenders[other]["min_s"] / ours["min_s"])
        assert set(row["epilogue_cost"]) == set(peers.FUSED)
    assert all({"dtype", "what", "value", "target", "met"} <= set(line) for line in document["summary"])
    int8_gain = [row for row in document["rows"] if peers.OURS_BF16 in row["speed_over"]]
    assert [(row["dtype"], row["m"]) for row in int8_gain] == [("int8", 512), ("int8", 1024)]


def test_run_writes_json_of_convolutions(small_run: tuple[str, pathlib.Path]) -> None:
    document = json.loads((small_run[1] / "run.json").read_text())
    rows = document["convolutions"]
    assert [(row["dtype"], row["convolution"]) for row in rows] == [
        (dtype, f"2x{conv}") for dtype in ("f32", "bf16") for conv in CONVS
    ]
    for row in rows:
        contenders, ends = row["contenders"], row["convolution"].endswith("+")
        assert set(contenders) == {peers.OURS, *conv_peers.PEERS, *(conv_peers.ENDS if ends else ())}
        ours = contenders[peers.OURS]
        assert ours["status"] == contenders[conv_peers.EAGER]["status"] == "ok", row
        peak = document["roofs"][row["dtype"]]["per_second"]
        assert ours["peak_share"] == pytest.approx(row["flop"] / ours["min_s"] / peak)
        for other, speed in row["speed_over"].items():
            assert speed["minimum"] == pytest.approx(contenders[other]["min_s"] / ours["min_s"])
        assert (conv_peers.OURS_APART in row["fused_end_over"]) == ends


def test_run_draws_the_roofline(small_run: tuple[str, pathlib.Path]) -> None:
    image = pytest.importorskip("matplotlib.image").imread(small_run[1] / "run.png")
    assert image.shape[0] >= 400
    assert image.shape[1] >= 1200
    pixels = torch.tensor(image[:, :, :3])
    assert 0.5 < float((pixels > 0.99).all(dim=2).float().mean()) < 0.99, "not a drawing on white"
    thirds = pixels.chunk(3, dim=1)
    onednn = thirds if onednn_has("bf16") else (thirds[0], thirds[2])
    for name, panels in ((peers.OURS, thirds), (peers.ONEDNN, onednn), (peers.MKL, thirds[:1])):
        colour = torch.tensor([int(plot.STYLES[name]["color"][at : at + 2], 16) / 255 for at in (1, 3, 5)])
        for panel in panels:
            close = ((panel - colour).abs() < 0.2).all(dim=2)
            assert int(close.sum()) > 20, f"{name} is not drawn in every panel"
