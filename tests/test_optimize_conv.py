"""xopt.optimize on models with convolutions: what is fused, how exact it is, which layout they take and give."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import xopt
from tests.families import kernel_calls

ROUNDING = 1.2e-7  # of an fp32 result: where theirs is no larger, chance has a say
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def settled(model: nn.Module) -> Any:
    """In evaluation mode, with BatchNorms that do something."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, 0.0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.0)
                nn.init.normal_(module.bias, 0.0, 0.1)
    return model.eval()


def conv_norm(
    channels: int, out: int, kernel: int, activation: type[nn.Module] | None, **options: Any
) -> nn.Sequential:
    layers = [nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False, **options), nn.BatchNorm2d(out)]
    return nn.Sequential(*layers, *([] if activation is None else [activation()]))


class Residual(nn.Module):
    def __init__(self, channels: int = 24, **options: Any) -> None:
        super().__init__()
        self.first = conv_norm(channels, channels, 3, nn.ReLU, **options)
        self.second = conv_norm(channels, channels, 3, None, **options)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        y += x
        return self.relu(y)  # type: ignore[no-any-return]


class InvertedResidual(nn.Module):
    """As in MobileNetV3 and EfficientNet: expansion, depthwise, squeeze and excitation, projection."""

    def __init__(self, channels: int = 24, wide: int = 72) -> None:
        super().__init__()
        self.expand = conv_norm(channels, wide, 1, nn.Hardswish)
        self.depthwise = conv_norm(wide, wide, 5, nn.SiLU, groups=wide)
        self.squeeze, self.excite = nn.Conv2d(wide, 8, 1), nn.Conv2d(8, wide, 1)
        self.project = conv_norm(wide, channels, 1, None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        gate = functional.adaptive_avg_pool2d(y, 1)
        y = y * torch.sigmoid(self.excite(functional.relu(self.squeeze(gate))))
        return x + self.project(y)  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """A stem, blocks and a head, whose forward takes a view of pooled features, or of an image."""

    def __init__(self, *blocks: nn.Module, channels: int = 24, views_an_image: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 7, 2, 3), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*blocks)
        self.views_an_image = views_an_image
        self.head = nn.Linear(channels * (36 if views_an_image else 1), 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        if not self.views_an_image:
            x = functional.adaptive_avg_pool2d(x, 1)
        return self.head(x.view(x.shape[0], -1))  # type: ignore[no-any-return]


class Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 32, 10, 5, bias=False), nn.Conv1d(32, 48, 3, 2)
        self.depthwise, self.norm = nn.Conv1d(48, 48, 9, padding="same", groups=48), nn.LayerNorm(48)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.second(functional.gelu(self.first(x))))
        return self.norm(self.depthwise(x).transpose(1, 2))  # type: ignore[no-any-return]


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 20, 3, padding=1), nn.BatchNorm3d(20)
        self.second = nn.Conv3d(20, 20, (1, 3, 3), padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.first(x)))
        return torch.tanh(self.second(y) + y)


class Causal(nn.Conv1d):
    """A forward of its own, which goes on to torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, (self.dilation[0] * (self.kernel_size[0] - 1), 0)))


class InTorchsLayout(nn.Module):
    """Between convolutions, sequences; back from them, it asks for torch's layout, as diffusers' transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        batch, channels, height, width = x.shape
        tokens = self.linear(x.permute(0, 2, 3, 1).reshape(batch, height * width, channels))
        x = tokens.reshape(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()
        return x.view(batch, channels, -1).mean(-1)[..., None, None] + self.second(x).relu()  # type: ignore[no-any-return]


class SamePadded(nn.Module):
    """Pads by the image's size, as TensorFlow does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, 2), nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.pad(x, (0, 1, x.shape[-2] % 2, 2), "constant", 0.0)
        return functional.relu(self.norm(self.conv(x)))


class MixedFeedForward(nn.Module):
    """As PVT and SegFormer have it: a convolution sees tokens as an image, the activation behind it tokens again."""

    def __init__(self, written_out: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 48), nn.Linear(48, 24)
        self.image, self.written_out = nn.Conv2d(48, 48, 3, 1, 1, groups=48), written_out

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        tokens = self.first(x.flatten(2).transpose(1, 2))
        image = self.image(tokens.transpose(1, 2).view(batch, -1, height, width))
        tokens = image.flatten(2).transpose(1, 2)
        tokens = tokens * torch.sigmoid(tokens) if self.written_out else functional.gelu(tokens)
        return self.second(tokens).transpose(1, 2).reshape(batch, channels, height, width)  # type: ignore[no-any-return]


def many(block: Callable[[], nn.Module], count: int = 3) -> list[nn.Module]:
    return [block() for _ in range(count)]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (lambda: Classifier(*many(Residual)), (6, 3, 37, 40)),
    "grouped": (lambda: Classifier(*many(lambda: Residual(32, groups=8)), channels=32), (6, 3, 37, 40)),
    "depthwise": (lambda: Classifier(*many(InvertedResidual)), (6, 3, 37, 40)),
    "dilated": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, dilation=2), nn.GELU(), nn.Conv2d(8, 5, 2, 3)),
        (2, 3, 21, 20),
    ),
    "audio": (Audio, (2, 1, 900)),
    "in torch's layout": (lambda: nn.Sequential(InTorchsLayout(), nn.Conv2d(32, 8, 1)), (2, 3, 12, 11)),
    "causal": (lambda: nn.Sequential(Causal(2, 24, 3), nn.ReLU(), Causal(24, 40, 4, dilation=2)), (2, 2, 70)),
    "volumes": (Volumes, (1, 2, 5, 9, 11)),
    "mixed": (
        lambda: nn.Sequential(nn.Conv2d(3, 24, 4, 4), *many(MixedFeedForward), nn.AvgPool2d(3), nn.Flatten()),
        (2, 3, 36, 28),
    ),
    "more than a program": (lambda: Classifier(*many(Residual, 12)), (6, 3, 37, 40)),
}  # fmt: skip


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_no_less_exact_than_torch(name: str, dtype: torch.dtype, channels_last: bool) -> None:
    expect_no_less_exact(*MODELS[name], dtype, channels_last)


def expect_no_less_exact(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool
) -> None:
    torch.manual_seed(1)
    source, x = settled(make()), torch.randn(shape)
    if channels_last and len(shape) != 4:
        pytest.skip("torch has this layout for images only")
    if channels_last:
        source, x = source.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        exact = copy.deepcopy(source).double()(x.double())
        plain = copy.deepcopy(source).to(dtype)(x.to(dtype))
        optimized = xopt.optimize(source, dtype=dtype)
        result = optimized(x)
        expected_strides = source(x).stride()
    assert result.dtype == torch.float32
    assert type(optimized) is type(source)
    assert result.shape == exact.shape
    assert result.stride() == expected_strides
    assert relative_error(result, exact) <= 1.1 * relative_error(plain, exact) + ROUNDING
    assert xopt.report(optimized).optimized_conv_share == 1.0


def fused_in(model: nn.Module) -> list[str]:
    """But for functions that became a step of ours by themselves."""
    return [label for fusion in xopt.report(model).fusions for label in fusion.fused if label != "adaptive_pool"]


def test_what_is_fused() -> None:
    x = torch.randn(1, 3, 33, 33)
    model = xopt.optimize(settled(Classifier(Residual())), sample_input=x)
    assert fused_in(model) == ["conv+batch_norm+relu", "conv+batch_norm+relu", "conv+batch_norm+add+relu"]
    model = xopt.optimize(settled(Classifier(InvertedResidual())), sample_input=x)
    assert fused_in(model) == [
        "conv+batch_norm+relu",
        "conv+batch_norm+hardswish",
        "conv+batch_norm+silu",
        "conv+relu",
        "conv+sigmoid",
        "conv+batch_norm+add",
    ]
    source = settled(nn.Sequential(Causal(2, 24, 3), nn.ReLU()))
    model = xopt.optimize(source, sample_input=torch.randn(1, 2, 9))
    assert isinstance(model[0], Causal)
    assert fused_in(copy.deepcopy(model)) == []
    assert fused_in(model) == ["conv+relu"]


@pytest.mark.parametrize("written_out", [False, True])
def test_an_activation_behind_views(written_out: bool) -> None:
    model = xopt.optimize(MixedFeedForward(written_out).eval(), sample_input=torch.randn(1, 24, 7, 6))
    assert ("conv+silu" if written_out else "conv+gelu_erf") in fused_in(model)


def test_report_counts_convolutions() -> None:
    model = xopt.optimize(settled(Classifier(InvertedResidual())), sample_input=torch.randn(1, 3, 33, 33))
    assert "100.0% of the convolutions' weights" in str(xopt.report(model))


def test_runs_on_xopts_kernels() -> None:
    model, before = xopt.optimize(settled(Classifier(InvertedResidual()))), kernel_calls()
    with torch.no_grad():
        model(torch.randn(1, 3, 33, 33))
    used = {record.split()[0] for record, calls in kernel_calls().items() if calls > before[record]}
    assert {"conv", "conv_depthwise", "gemm", "epilogue"} <= used


def test_switches() -> None:
    source, x = settled(Classifier(Residual())), torch.randn(1, 3, 33, 33)
    norms = ["batch_norm+relu", "batch_norm+relu", "batch_norm+add+relu"]
    cases: dict[str, list[str]] = {
        "conv_bn_folding": norms,
        "fuse_conv": [*["conv+batch_norm"] * 3, "add+relu"],
        "conv_prepack": norms,
    }
    for switch, fused in cases.items():
        model = xopt.optimize(source, config=xopt.Config(**{switch: False}), sample_input=x)
        assert fused_in(model) == fused, switch
        with torch.no_grad():
            assert torch.allclose(model(x), source(x), atol=1e-5)
    assert xopt.report(model).optimized_conv_share == 0.0
    assert xopt.optimize(source, conv_bn_folding=False, weights_prepack=False)


# ---- Layout ----------------------------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Keeps what passes."""

    last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["last"] = x
        return x


def test_channels_stay_last_inside_and_the_output_is_as_the_sources() -> None:
    source: Any = nn.Sequential(nn.Conv2d(3, 8, 3), Seen(), nn.Conv2d(8, 5, 3)).eval()
    x = torch.randn(2, 3, 9, 9)
    model: Any = xopt.optimize(source)
    with torch.no_grad():
        assert model(x).stride() == source(x).stride()
        assert model[1].last.is_contiguous(memory_format=torch.channels_last)
        last = x.to(memory_format=torch.channels_last)
        assert model(last).stride() == source(last).stride()
        one: Any = xopt.optimize(nn.Sequential(nn.Conv2d(1, 8, 3), Seen(), nn.Conv2d(8, 5, 3)).eval())
        assert one(torch.randn(2, 1, 9, 9)).is_contiguous()
        assert one[1].last.is_contiguous(memory_format=torch.channels_last)
        # A part that is called on its own answers as torch does.
        assert model[0](x).is_contiguous()
        assert model[0](last).is_contiguous(memory_format=torch.channels_last)
        weights_last = source.to(memory_format=torch.channels_last)
        assert xopt.optimize(weights_last)(x).stride() == weights_last(x).stride()


@pytest.mark.parametrize("blocks", [1, 12])
def test_a_view_of_an_image(blocks: int) -> None:
    """As a program it is a reshape; where the forward runs by itself, it gets the layout that it was written for."""
    source = settled(Classifier(*many(Residual, blocks), views_an_image=True))
    x = torch.randn(2, 3, 12, 12)
    model = xopt.optimize(source)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(model(x), source(x), atol=1e-4)


def test_other_errors_are_not_swallowed() -> None:
    class Fails(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            raise RuntimeError("no such thing")

    model = xopt.optimize(Fails().eval(), config=xopt.Config(fuse_conv=False))
    with pytest.raises(RuntimeError, match="no such thing"):
        model(torch.randn(1, 3, 4, 4))


# ---- The module that others see --------------------------------------------------------------------------------------


def test_keys_values_and_copies() -> None:
    source = settled(Classifier(Residual(32, groups=4), channels=32))
    before = {name: value.clone() for name, value in source.state_dict().items()}
    x = torch.randn(1, 3, 20, 20)
    model = xopt.optimize(source, sample_input=x)
    for state in (model.state_dict(), source.state_dict()):
        assert list(state) == list(before)
        assert all(torch.equal(state[name], value) for name, value in before.items())
    assert isinstance(model.stem[0], nn.Conv2d)
    assert model.stem[0].weight.shape == source.stem[0].weight.shape
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    with torch.no_grad():
        for copied in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
            assert torch.equal(copied(x), model(x))
        changed = {name: value + 0.01 for name, value in before.items() if value.is_floating_point()}
        for each in (model, source):
            each.load_state_dict(changed, strict=False)
        assert torch.allclose(model(x), source(x), atol=1e-4)
        assert torch.allclose(model.double()(x.double()), source.double()(x.double()))


def test_a_changed_norm_is_seen() -> None:
    source = settled(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    model, x = xopt.optimize(source), torch.randn(1, 3, 6, 6)

    def check() -> None:
        with torch.no_grad():
            assert torch.allclose(model(x), source(x), atol=1e-5)

    check()
    for each in (source, model):
        each[1].running_mean.add_(1.0)
    check()
    for each in (source, model):
        with torch.no_grad():
            each[1].weight.mul_(2.0)
            each[0].bias.add_(3.0)
    check()
    assert fused_in(model) == ["conv+batch_norm"]


def test_norms_that_cannot_be_folded() -> None:
    for norm in (
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8).train(),
    ):
        source = settled(nn.Sequential(nn.Conv2d(3, 8, 3), norm))
        model, x = xopt.optimize(source), torch.randn(2, 3, 6, 6)
        with torch.no_grad():
            assert torch.allclose(model(x), source(x), atol=1e-5)


def test_gradients_of_inputs() -> None:
    source = settled(Classifier(Residual()))
    model, x = xopt.optimize(source), torch.randn(1, 3, 20, 20)
    gradients = []
    for each in (source, model):
        leaf = x.clone().requires_grad_()
        each(leaf).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-4)


def test_compile_and_export() -> None:
    model, x = xopt.optimize(settled(Classifier(Residual()))), torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        expected = model(x)
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend="aot_eager")
        assert torch.allclose(compiled(x), expected, atol=1e-4)
        program = torch.export.export(model, (x,))
        assert torch.allclose(program.module()(x), expected, atol=1e-4)


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "double": (lambda: nn.Conv2d(3, 4, 2).double(), "dtype torch.float64"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone_with_a_reason(name: str) -> None:
    make, reason = LEFT[name]
    source = nn.Sequential(make()).eval()
    model = xopt.optimize(source)
    x = torch.randn(1, 3, 6, 6, dtype=next(source.parameters()).dtype)
    with torch.no_grad():
        assert torch.equal(model(x), source(x))
    assert any(reason in entry.detail for entry in xopt.report(model).entries)


def test_shared_weights() -> None:
    source = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    source[1].weight = source[0].weight
    model, x = xopt.optimize(source.eval()), torch.randn(1, 4, 5, 5)
    assert model[0].weight is model[1].weight
    with torch.no_grad():
        assert torch.allclose(model(x), source(x), atol=1e-5)


def test_images_stay_channels_last_where_torchs_layout_is_asked_for() -> None:
    model = xopt.optimize(nn.Sequential(InTorchsLayout(), nn.Conv2d(32, 8, 1)).eval())
    layouts = []

    def see(module: nn.Module, args: Any) -> None:
        layouts.append(args[0].is_contiguous(memory_format=torch.channels_last))

    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(2, 3, 12, 11))
        model[1].register_forward_pre_hook(see)
        result = model(torch.randn(2, 3, 12, 11))
    assert layouts == [True]
    assert result.is_contiguous()


def test_images_of_few_channels_are_read_as_they_lie() -> None:
    """Nothing copies them into another layout; a layer called by itself answers in the layout of its input."""
    layers = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3), nn.AdaptiveAvgPool2d(1))
    model, source = xopt.optimize(layers.eval()), copy.deepcopy(layers)
    with torch.no_grad():
        model(torch.randn(1, 3, 20, 21))  # records it
        for batch in (1, 3):
            x = torch.randn(batch, 3, 20, 21)
            with torch.profiler.profile() as profile:
                result = model(x)
            assert "aten::copy_" not in {event.key for event in profile.key_averages()}
            torch.testing.assert_close(result, source(x), rtol=1e-4, atol=1e-5)
        alone = model[0](x)
    assert alone.is_contiguous()
    torch.testing.assert_close(alone, source[0](x), rtol=1e-4, atol=1e-5)


def test_zeros_around_an_image_are_part_of_the_convolution() -> None:
    torch.manual_seed(0)
    zeros, ones = nn.ZeroPad2d((1, 0, 0, 2)), nn.ConstantPad2d(1, 1.0)
    source = settled(nn.Sequential(SamePadded(), zeros, nn.Conv2d(32, 8, 3, padding=1), ones, nn.Conv2d(8, 4, 3)))
    optimized = xopt.optimize(source)
    with torch.no_grad():
        for height in (20, 21, 20, 9):
            x = torch.randn(2, 3, height, 17)
            torch.testing.assert_close(optimized(x), source(x), rtol=1e-4, atol=1e-5)
        pads = "aten::constant_pad_nd"
        with torch.profiler.profile() as profile:
            optimized(x)
    assert sum(event.count for event in profile.key_averages() if event.key == pads) == 1  # of ones
