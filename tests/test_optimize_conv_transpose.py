"""xopt.optimize on models with transposed convolutions: how exact, what is fused, and what stays as it was."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.conv_cases import last
from tests.families import kernel_calls
from tests.test_optimize_conv import DTYPES, expect_no_less_exact, fused_in, settled


class Decoder(nn.Module):
    """As in a UNet: up, joined with what was there before, and down to a few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(24, 20, 2, 2)
        self.join = nn.Conv2d(23, 20, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x))
        return self.join(torch.cat([y, x], 1)) + y  # type: ignore[no-any-return]


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.ConvTranspose2d(30, 40, 4), nn.BatchNorm2d(40), nn.ReLU(inplace=True)),
            *(nn.ConvTranspose2d(40, 24, 4, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True)),
            *(nn.ConvTranspose2d(24, 3, 3, 2, 1, 1), nn.Tanh()),
        )


class Vocoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(40, 20, 16, 8, 4)
        self.residual = nn.Conv1d(20, 20, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(nn.functional.leaky_relu(x, 0.1))
        return torch.relu(self.residual(x) + x)


class Sized(nn.Module):
    """The size of the result is told by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 16, 3, 2, 1), nn.ConvTranspose2d(16, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(self.down(x), output_size=x.shape[2:]) + x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "decoder": (Decoder, (2, 3, 16, 18)),
    "generator": (Generator, (2, 30, 3, 3)),
    "vocoder": (Vocoder, (2, 40, 21)),
    "sized": (Sized, (2, 4, 11, 12)),
    "volumes": (
        lambda: nn.Sequential(nn.Conv3d(2, 8, 3), nn.ConvTranspose3d(8, 4, 2, 2, groups=2), nn.ReLU()),
        (1, 2, 5, 6, 7),
    ),
    "depthwise": (lambda: nn.Sequential(nn.ConvTranspose2d(40, 40, 4, 2, 1, groups=40), nn.GELU()), (2, 40, 5, 6)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_no_less_exact_than_torch(name: str, dtype: torch.dtype, channels_last: bool) -> None:
    expect_no_less_exact(*MODELS[name], dtype, channels_last)


def test_what_is_fused() -> None:
    model = xopt.optimize(settled(Generator()), sample_input=torch.randn(2, 30, 3, 3))
    step = "conv_transpose+batch_norm+relu"
    assert fused_in(model) == [step, step, "conv_transpose+tanh"]
    model = xopt.optimize(Sized().eval(), sample_input=torch.randn(2, 4, 11, 12))
    assert fused_in(model) == ["conv_transpose+add+relu"]
    before = kernel_calls()
    with torch.no_grad():
        for size in ((11, 12), (12, 11), (5, 8)):
            x = torch.randn(2, 4, *size)
            assert model(x).shape == x.shape
    assert any(count > before[record] for record, count in kernel_calls().items() if record.startswith("conv "))


def test_alone() -> None:
    """Called as torch's module is, with its arguments, its errors and its single images."""
    source: Any = nn.ConvTranspose2d(6, 8, 3, 2, 1, bias=False).eval()
    model: Any = xopt.optimize(copy.deepcopy(source))
    x = torch.randn(2, 6, 5, 5)
    with torch.no_grad():
        for size in (None, (9, 9), (10, 9), [2, 8, 10, 10]):
            for each in (x, last(x), x[0]):
                if size is None or each.dim() == 4 or len(size) == 2:
                    result, expected = model(each, output_size=size), source(each, output_size=size)
                    assert torch.allclose(result, expected, atol=1e-5)
                    assert result.stride() == expected.stride()
        with pytest.raises(ValueError, match="requested an output size"):
            model(x, output_size=(12, 12))
        with pytest.raises(RuntimeError, match="expected 6 channels"):
            model(x[:, 1:])
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    assert leaf.grad is not None
    assert torch.allclose(model.double()(x.double()), source.double()(x.double()))


def test_neighbours_as_one_pixel() -> None:
    """Geometries of which some are computed in blocks (`wide_taps.py`), each with all sizes of its output."""
    found = 0
    for channels, kernel, stride, padding, extra, dilation in itertools.product(
        (3, 16, 40), (1, 2, 4, 5), (2, 3), (0, 1, 3), (0, 1), (1, 2)
    ):
        source = nn.ConvTranspose2d(
            6, channels, (2, kernel), (2, stride), (0, padding), (0, extra), 1, True, (1, dilation)
        )
        x = last(torch.randn(2, 6, 3, 5))
        if 4 * stride - 2 * padding + dilation * (kernel - 1) + extra + 1 < 1:
            continue
        model: Any = xopt.optimize(copy.deepcopy(source).eval())
        found += model.weight.place.taps.wide is not None
        assert torch.equal(model.state_dict()["weight"], source.weight)
        with torch.no_grad():
            natural = source(x)
            least = natural.shape[-1] - extra
            for width in {least, natural.shape[-1], least + stride - 1}:
                expected = source(x, output_size=(6, width)) if width > 0 else natural
                result = model(x, output_size=(6, width)) if width > 0 else model(x)
                assert torch.allclose(result, expected, atol=1e-5), (channels, kernel, stride, padding, extra, dilation)
                assert result.is_contiguous(memory_format=torch.channels_last)
    assert found > 20


def test_blocks_with_a_residual() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.ConvTranspose2d(8, 6, 2, 2, bias=False), nn.BatchNorm2d(6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.relu(self.norm(self.up(x)) + y)

    source, x, y = settled(Ends()), last(torch.randn(2, 8, 3, 4)), torch.randn(2, 6, 6, 8)
    model = xopt.optimize(source)
    with torch.no_grad():
        for each in (y, last(y), last(torch.cat([y, y], 1))[:, 3:9]):
            assert torch.allclose(model(x, each), source(x, each), atol=1e-5)
    assert fused_in(model) == ["conv_transpose+batch_norm+add+relu"]


def test_keys_values_and_copies() -> None:
    source: Any = settled(Generator())
    before = {name: value.clone() for name, value in source.state_dict().items()}
    x = torch.randn(1, 30, 3, 3)
    model: Any = xopt.optimize(source, sample_input=x)
    for state in (model.state_dict(), source.state_dict()):
        assert list(state) == list(before)
        assert all(torch.equal(state[name], value) for name, value in before.items())
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
        for each in (model, source):  # what the weight is packed for changes
            each[3].stride = (3, 3)
        assert torch.allclose(model(x), source(x), atol=1e-4)


def test_compile_and_export() -> None:
    model, x = xopt.optimize(settled(Generator())), torch.randn(2, 30, 3, 3)
    with torch.no_grad():
        expected = model(x)
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend="aot_eager")
        assert torch.allclose(compiled(x), expected, atol=1e-4)
        program = torch.export.export(model, (x,))
        assert torch.allclose(program.module()(x), expected, atol=1e-4)


def test_a_weight_that_both_kinds_share_is_not_the_sources() -> None:
    source = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.ConvTranspose2d(8, 8, 3, bias=False)).eval()
    source[1].weight = source[0].weight
    optimized = xopt.optimize(source)
    assert "shared with a layer of another kind" in str(xopt.report(optimized))
    x = torch.randn(1, 8, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), source(x), rtol=1e-5, atol=1e-5)
        before = source(x)
        optimized.load_state_dict({name: 2 * value for name, value in source.state_dict().items()})
        assert torch.equal(source(x), before)
        torch.testing.assert_close(optimized(x), 4 * before, rtol=1e-5, atol=1e-5)
