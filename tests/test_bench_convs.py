"""The convolutions of the kernel bench: their list, the check of their results, and one small run from end to end."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.test_bench import QUIET, ROOFS, finding, timing
from xopt.bench import cli, conv_peers, kernels, peers, report, results
from xopt.bench.conv_problem import ConvProblem, check_conv, make_conv_problem, make_conv_weight
from xopt.bench.conv_shapes import MODEL_CONVS, all_convs, parse_conv, parse_convs, quick_convs
from xopt.bench.errors import WrongResultError
from xopt.bench.results import Case
from xopt.bench.rotation import Rotation

DTYPES = ("f32", "bf16")


# ---- The list -------------------------------------------------------------------------------------------------------


def convs_of(model: nn.Module, *inputs: torch.Tensor) -> list[str]:
    seen: dict[str, None] = {}

    def hear(conv: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        assert isinstance(conv, nn.Conv2d)
        size, (kernel, _), (stride, _) = list(args[0].shape[1:]), conv.kernel_size, conv.stride
        assert conv.padding == (kernel // 2, kernel // 2)
        text = f"{'x'.join(map(str, size))}:{conv.out_channels}x{kernel}x{kernel}{f'/{stride}' if stride > 1 else ''}"
        seen[text] = None

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(hear)
    with torch.no_grad():
        model(*inputs)
    return list(seen)


def test_the_list_is_that_of_the_models() -> None:
    transformers, diffusers = pytest.importorskip("transformers"), pytest.importorskip("diffusers")
    listed = {model: [text.rstrip("+") for text in texts] for model, texts in MODEL_CONVS.items()}
    with torch.device("meta"):
        resnet = transformers.ResNetModel(transformers.ResNetConfig())
        unet = diffusers.UNet2DConditionModel(cross_attention_dim=768)
        assert listed["ResNet-50"] == convs_of(resnet, torch.randn(1, 3, 224, 224))
        inputs = torch.randn(1, 4, 64, 64), torch.tensor([1]), torch.randn(1, 77, 768)
        assert listed["SD 1.5 UNet"] == convs_of(unet, *inputs)


def test_shapes() -> None:
    shape = parse_conv("64x57x28:128x3x3/2+", batch=2)
    assert (shape.out_size, shape.m, shape.n, shape.k) == ((29, 14), 2 * 29 * 14, 128, 64 * 9)
    assert shape.ends_block
    assert str(shape) == "2x64x57x28:128x3x3/2+"
    assert [str(each) for each in all_convs()] == [text for texts in MODEL_CONVS.values() for text in texts]
    assert {each.model for each in quick_convs()} == set(MODEL_CONVS)
    assert parse_convs("3x8x8:4x1x1,3x8x8:4x1x1") == [parse_conv("3x8x8:4x1x1")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--convs", "3x8x8"], "'3x8x8' is not a convolution"),
        (["--convs", "3x8x8:4x3x1"], "'3x8x8:4x3x1' is not a convolution"),
        (["--convs", "3x8x8:4x3x3/0"], "'3x8x8:4x3x3/0' is not a convolution"),
        (["--convs", ","], "no convolution was given"),
        (["--convs", "3x8x8:4x3x3", "--dtype", "int8"], "convolutions are measured in f32, bf16"),
        (["--batch", "0"], "--batch: got 0"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "products", "convs"),
    [
        ([], True, True),
        (["--only", "convs"], False, True),
        (["--only", "products"], True, False),
        (["--shapes", "1x2x3"], True, False),
        (["--convs", "3x8x8:4x3x3"], False, True),
        (["--convs", "3x8x8:4x3x3", "--shapes", "1x2x3"], True, True),
    ],
)
def test_what_is_chosen(arguments: list[str], products: bool, convs: bool) -> None:
    options = cli.build_parser(cli.find_commands()).parse_args(["kernels", "--quick", *arguments])
    chosen = kernels.choose_shapes(options)
    assert (bool(chosen[0]), bool(chosen[1])) == (products, convs)


# ---- Checks and arithmetic ------------------------------------------------------------------------------------------


def problem_of(dtype: str, text: str) -> ConvProblem:
    shape = parse_conv(text, batch=2)
    return make_conv_problem(make_conv_weight(dtype, shape), shape)


def right_result(problem: ConvProblem, epilogue: str) -> torch.Tensor:
    values, weight, bias = (each.double() for each in (problem.input, problem.weight.values, problem.weight.bias))
    fused = epilogue != "none"
    result = functional.conv2d(values, weight, bias if fused else None, problem.shape.stride, problem.shape.padding)
    if fused:
        result = (result + problem.residual.double()).relu()
    return result.to(problem.input.dtype)


@pytest.mark.parametrize("epilogue", ["none", conv_peers.END])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["5x9x7:40x3x3/2", "7x6x8:33x1x1+", "3x11x10:8x7x7/2"])
def test_only_right_results_pass_the_check(text: str, dtype: str, epilogue: str) -> None:
    problem = problem_of(dtype, text)
    result = right_result(problem, epilogue)
    check_conv(problem, result, epilogue)
    for spoil in (lambda x: x * 1.05, lambda x: x.roll(1, 1), lambda x: x.roll(1, 2), lambda x: x.roll(1, 3)):
        with pytest.raises(WrongResultError, match="off by"):
            check_conv(problem, spoil(result), epilogue)
    with pytest.raises(WrongResultError, match="expected"):
        check_conv(problem, result[:, :-1], epilogue)
    result[1, 3, 2, 1] = math.nan
    with pytest.raises(WrongResultError, match="not finite"):
        check_conv(problem, result, epilogue)


def test_images_have_their_channels_last() -> None:
    problem = problem_of("bf16", "5x9x7:40x3x3/2")
    for image in (problem.input, problem.residual):
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert image.double().std() > 0.5


def made_up_case(text: str, model: str = "", **seconds: float) -> Case:
    names = {
        "ours": peers.OURS,
        "onednn": peers.ONEDNN,
        "end": conv_peers.OURS_END,
        "apart": conv_peers.OURS_APART,
    }
    timings = {names[name]: timing(value, 2 * value) for name, value in seconds.items()}
    return Case("bf16", parse_conv(text, model=model), 1, Rotation(2, 1 << 30, "memory"), timings)


def test_summary_against_the_target() -> None:
    flop = parse_conv("64x8x8:64x3x3").flop
    cases = [
        made_up_case("64x8x8:64x3x3", "ResNet-50", ours=flop / 500e9, onednn=flop / 1000e9),
        made_up_case("64x8x8:64x1x1+", "SD 1.5 UNet", ours=1.0, onednn=8.0, end=1.1, apart=2.2),
    ]
    findings = results.summarize(cases, ROOFS)
    mean = finding(findings, "bf16", "convolutions, speed over oneDNN prepacked, geometric mean")
    assert (mean.value, mean.shapes, mean.met) == (pytest.approx(2.0), 2, True)
    of_resnet = finding(findings, "bf16", "convolutions, speed over oneDNN prepacked, ResNet-50, geometric mean")
    assert (of_resnet.value, of_resnet.shapes) == (pytest.approx(0.5), 1)
    apart = finding(findings, "bf16", "fused residual end, speed over conv, add, relu apart, geometric mean")
    assert (apart.value, apart.shapes) == (pytest.approx(2.0), 1)
    lowest = finding(findings, "bf16", "convolutions, share of the peak, lowest")
    assert lowest.shape == "64x8x8:64x1x1+"
    assert not any("products" in line or "M >=" in line for line in (each.what for each in findings))


def test_what_quick_leaves_out_is_said() -> None:
    case = made_up_case("64x8x8:64x3x3", ours=1.0)
    quick = report.Setting(load_before=0.0, least_rounds=3, seconds=0.1, quick=True)
    total = len(all_convs())
    assert any(f"one in 3 of the {total} convolutions" in line for line in report.notes([case], quick))
    assert not any("--quick" in line for line in report.notes([case], QUIET))
