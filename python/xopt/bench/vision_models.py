"""Convolutional networks on images, and the two models that Stable Diffusion spends its time in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xopt.bench.model_case import BEST, Inputs, ModelCase, sizes_if

_STAGES: Any = {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 1, 1, 1]}
_PIXELS = 224  # where a configuration does not tell
_WORDS = 77  # of a prompt, padded
_LATENTS = 4
_CLASSES: Any = {"num_labels": 1000}  # ImageNet's; of the two that are transformers' default, an error is chance


def _resnet50(tiny: bool) -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = sizes_if(tiny, embedding_size=32, image_size=32, **_STAGES)
    return ResNetForImageClassification(ResNetConfig(**_CLASSES, **sizes))


def _mobilenet(tiny: bool) -> Any:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    sizes = sizes_if(tiny, depth_multiplier=0.35, image_size=32)
    return MobileNetV2ForImageClassification(MobileNetV2Config(**_CLASSES, **sizes))


def _convnext(tiny: bool) -> Any:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = sizes_if(tiny, image_size=32, **_STAGES)
    return ConvNextForImageClassification(ConvNextConfig(**_CLASSES, **sizes))


def _unet(tiny: bool, divisor: int = 1) -> Any:
    """The sizes of Stable Diffusion 1.5, which are diffusers' defaults but for the width of its text encoder."""
    diffusers: Any = importlib.import_module("diffusers")
    channels = tuple(count // divisor for count in (320, 640, 1280, 1280))
    sizes: Any = {"sample_size": 64, "cross_attention_dim": 768, "block_out_channels": channels}
    small: Any = {
        "sample_size": 8,
        "cross_attention_dim": 32,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "norm_num_groups": 8,
    }
    return diffusers.UNet2DConditionModel(**(small if tiny else sizes))


class _Decoder(nn.Module):
    """What a VAE does with latents, without its encoder."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.config = vae.config
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder

    def forward(self, sample: torch.Tensor) -> Any:
        return self.decoder(self.post_quant_conv(sample))


def _vae_decoder(tiny: bool, divisor: int = 1) -> Any:
    """The sizes of Stable Diffusion's."""
    diffusers: Any = importlib.import_module("diffusers")
    channels = (32, 64) if tiny else tuple(count // divisor for count in (128, 256, 512, 512))
    sizes: Any = {"layers_per_block": 1 if tiny else 2, "latent_channels": _LATENTS, "sample_size": 16 if tiny else 512}
    down, up = ("DownEncoderBlock2D",) * len(channels), ("UpDecoderBlock2D",) * len(channels)
    blocks: Any = {"block_out_channels": channels, "down_block_types": down, "up_block_types": up}
    return _Decoder(diffusers.AutoencoderKL(**blocks, **sizes))


def _pixels(batch: int) -> Callable[[Any], Inputs]:
    def make(model: Any) -> Inputs:
        size = getattr(model.config, "image_size", _PIXELS)
        return {"pixel_values": torch.randn(batch, 3, size, size)}

    return make


def _noise_and_prompt(model: Any) -> Inputs:
    config = model.config
    return {
        "sample": torch.randn(1, _LATENTS, config.sample_size, config.sample_size),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, _WORDS, config.cross_attention_dim),
    }


def _latents(model: Any) -> Inputs:
    size = model.config.sample_size >> (len(model.config.block_out_channels) - 1)
    return {"sample": torch.randn(1, _LATENTS, size, size)}


def _half_width(build: Callable[..., Any]) -> Callable[[bool], Any]:
    """A quarter of the arithmetic on half as much memory, for machines with little of either."""
    return lambda tiny: build(tiny, divisor=2)


_SMALL_CONVS = {("bfloat16", BEST): 1.2, ("float32", BEST): 1.0}
_DIFFUSION = {("bfloat16", BEST): 1.3, ("float32", BEST): 1.0}
_RESNET = {("bfloat16", BEST): 1.15, ("float32", BEST): 1.0, ("bfloat16", "compile"): 1.08}
_UNET = {**_DIFFUSION, ("bfloat16", "compile"): 2.45}

CASES = (
    ModelCase("resnet50 1", _resnet50, _pixels(1), targets=_RESNET),
    ModelCase("resnet50 16", _resnet50, _pixels(16), targets=_RESNET),
    ModelCase("mobilenet-v2 1", _mobilenet, _pixels(1), targets=_SMALL_CONVS),
    ModelCase("mobilenet-v2 16", _mobilenet, _pixels(16), targets=_SMALL_CONVS),
    ModelCase("convnext-tiny 1", _convnext, _pixels(1), targets=_SMALL_CONVS),
    ModelCase("convnext-tiny 16", _convnext, _pixels(16), targets=_SMALL_CONVS),
    ModelCase("sd-1.5 unet 1x64x64", _unet, _noise_and_prompt, targets=_UNET, library="diffusers"),
    ModelCase("sd vae decoder 1x64x64", _vae_decoder, _latents, targets=_DIFFUSION, library="diffusers"),
    ModelCase("half-width sd-1.5 unet", _half_width(_unet), _noise_and_prompt, library="diffusers", only_by_name=True),
    ModelCase("half-width sd vae decoder", _half_width(_vae_decoder), _latents, library="diffusers", only_by_name=True),
)
