"""Models of diffusers, small and with random weights: their own attention processors are recorded and fused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xopt
from tests.test_chain_programs import watch_chains

diffusers = pytest.importorskip("diffusers")

Tensor = torch.Tensor


def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def vae() -> Any:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return diffusers.AutoencoderKL(block_out_channels=(32, 64), latent_channels=4, norm_num_groups=8, **blocks)


MODELS: dict[str, tuple[Callable[[], Any], tuple[tuple[int, ...], ...], set[str]]] = {
    "unet": (
        unet,
        ((2, 4, 16, 16), (2, 7, 32)),
        {"attention", "merged linear", "group_norm+silu", "conv+add", "gated halves (gelu_erf)"},
    ),
    "vae": (vae, ((1, 3, 32, 32),), {"attention", "group_norm+silu", "conv+add"}),
}


def run(model: Any, inputs: list[Tensor]) -> Tensor:
    arguments = [inputs[0], torch.tensor(10), inputs[1]] if len(inputs) == 2 else inputs
    sample: Tensor = model(*arguments).sample
    return sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_as_exact_as_torch_and_fused(name: str, dtype: torch.dtype) -> None:
    make, shapes, expected = MODELS[name]
    torch.manual_seed(0)
    source = make().eval()
    inputs = [torch.randn(shape) for shape in shapes]
    optimized = xopt.optimize(source, dtype=dtype)
    assert list(optimized.state_dict()) == list(source.state_dict())
    with torch.no_grad():
        exact = run(copy.deepcopy(source).double(), [each.double() for each in inputs])
        theirs = run(copy.deepcopy(source).to(dtype), [each.to(dtype) for each in inputs])
        for _ in range(2):
            result = run(optimized, inputs)
    assert result.dtype == torch.float32
    assert relative_error(result, exact) <= 1.1 * relative_error(theirs, exact) + 1e-6
    report = xopt.report(optimized)
    assert report.optimized_linear_share >= 0.95
    assert report.optimized_conv_share >= 0.95
    if name == "unet":  # the VAE draws from what its encoder gives
        assert [(fusion.path, fusion.problem) for fusion in report.fusions] == [("", None)]
    upsampled = "upsample+conv" if dtype == torch.float32 else "upsample"
    assert expected | {upsampled} <= {step for fusion in report.fusions for step in fusion.fused}


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def test_images_keep_their_layout_through_a_unet() -> None:
    """Its transformers make tokens of an image and a contiguous image of them again."""
    model, inputs = xopt.optimize(unet().eval()), [torch.randn(2, 4, 16, 16), torch.randn(2, 7, 32)]
    seen: dict[str, bool] = {}
    with torch.no_grad():
        run(model, inputs)
        for name, module in model.named_modules():
            if name.endswith(("resnets.1", "attentions.0", "upsamplers.0", "downsamplers.0")):

                def look(_: Any, __: Any, result: Any, name: str = name) -> None:
                    image = result[0] if isinstance(result, tuple) else result
                    seen[name] = image.is_contiguous(memory_format=torch.channels_last)

                module.register_forward_hook(look)
        result = run(model, inputs)
    assert len(seen) >= 5
    assert all(seen.values()), seen
    assert result.is_contiguous()


def test_transformers_and_what_is_between_are_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the image that is enlarged, and from there on: in a batch of any size, of images of any size."""
    texts: list[str] = []
    watch_chains(monkeypatch, texts.append)
    torch.manual_seed(0)
    source = unet().eval()
    optimized = xopt.optimize(source)
    whole: list[str] = []
    for images, size in ((2, 16), (1, 8), (3, 24), (2, 16)):
        inputs = [torch.randn(images, 4, size, size), torch.randn(images, 7, 32)]
        texts.clear()
        with torch.no_grad():
            torch.testing.assert_close(run(optimized, inputs), run(source, inputs), rtol=1e-3, atol=1e-4)
        assert [text.count("\nattention ") for text in texts] == [4, 4]
        assert all("\nlinear_gated " in text and "\ngroup_norm " in text for text in texts)
        whole = whole or [*texts]
        assert whole == texts
