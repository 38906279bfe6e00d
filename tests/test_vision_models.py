"""Architectures on images, volumes and sound, small and with random weights: as exact as torch in the same dtype, with
nearly all multiply-adds on xopt's kernels, which are counted as those that torch has less to do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import xopt
from tests.families import as_dtype
from tests.test_optimize_conv import ROUNDING, relative_error, settled

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.long
Inputs = dict[str, torch.Tensor]
SMALL: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
STAGES: Any = {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 1, 1, 1]}
HEADS: Any = {"num_attention_heads": [1, 2, 4, 4]}
WINDOWS: Any = {"image_size": 32, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
DETECTOR: Any = {
    **{"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 6},
}
SOUND: Any = {"conv_dim": (32,) * 3, "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_conv_pos_embeddings": 8}
UNET: Any = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32, "norm_num_groups": 8}


def of(name: str, configuration: str = "", **sizes: Any) -> Callable[[], Any]:
    """A model of transformers, by its class."""
    made_by = configuration or name.removesuffix("Model") + "Config"
    return lambda: getattr(transformers, name)(getattr(transformers, made_by)(**sizes))


def detr() -> Any:
    backbone = transformers.ResNetConfig(embedding_size=32, **STAGES, out_features=["stage4"])
    options = {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone}
    return transformers.DetrModel(transformers.DetrConfig(**options, **DETECTOR))


def rt_detr() -> Any:
    outputs = ["stage2", "stage3", "stage4"]
    backbone = transformers.RTDetrResNetConfig(embedding_size=16, **STAGES, out_features=outputs)
    widths: Any = {"encoder_in_channels": [48, 64, 96], "decoder_in_channels": [64] * 3, "encoder_hidden_dim": 64}
    sizes = DETECTOR | {"num_denoising": 0}
    return transformers.RTDetrModel(transformers.RTDetrConfig(backbone_config=backbone, **widths, **sizes))


def mask2former() -> Any:
    outputs = ["stage1", "stage2", "stage3", "stage4"]
    sizes = WINDOWS | {"embed_dim": 16, "depths": [1] * 4, "num_heads": [1, 1, 2, 2]}
    backbone = transformers.SwinConfig(**sizes, out_features=outputs)
    widths = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 4, "num_queries": 6}
    widths |= {"encoder_feedforward_dim": 64, "dim_feedforward": 64}
    return transformers.Mask2FormerModel(transformers.Mask2FormerConfig(backbone_config=backbone, **widths, **layers))


def dpt() -> Any:
    sizes = SMALL | {"image_size": 32, "patch_size": 8, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
    necks = {"neck_hidden_sizes": [16, 24, 32, 48], "fusion_hidden_size": 32, "readout_type": "project"}
    return transformers.DPTForDepthEstimation(transformers.DPTConfig(**sizes, **necks))


def unet3d() -> Any:
    down, up = ("CrossAttnDownBlock3D", "DownBlock3D"), ("UpBlock3D", "CrossAttnUpBlock3D")
    blocks = {"down_block_types": down, "up_block_types": up, "attention_head_dim": 8}
    return diffusers.UNet3DConditionModel(sample_size=8, **blocks, **UNET)


def video_vae() -> Any:
    blocks = {"down_block_types": ("CogVideoXDownBlock3D",) * 2, "up_block_types": ("CogVideoXUpBlock3D",) * 2}
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    return diffusers.AutoencoderKLCogVideoX(**blocks, **sizes, temporal_compression_ratio=2)


def dit() -> Any:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8}
    return diffusers.DiTTransformer2DModel(**sizes, num_embeds_ada_norm=10)


def pixels(size: int, *batch: int) -> Inputs:
    return {"pixel_values": torch.randn(*(batch or (4,)), 3, size, size)}


def sound(length: int = 1000) -> Inputs:
    return {"input_values": torch.randn(2, length)}


def noise(*size: int, **more: torch.Tensor) -> Inputs:
    return {"sample": torch.randn(size), "timestep": torch.tensor(10), **more}


def latents() -> Inputs:
    conditions = {"timestep": torch.tensor([10]), "class_labels": torch.tensor([3])}
    return {"hidden_states": torch.randn(1, 4, 8, 8), **conditions}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Inputs]]] = {
    "efficientnet": (
        of("EfficientNetModel", width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320),
        lambda: pixels(48),
    ),
    "bit": (of("BitModel", embedding_size=32, num_groups=8, global_padding="SAME", **STAGES), lambda: pixels(64)),
    "convnext v2": (of("ConvNextV2Model", **STAGES), lambda: pixels(64)),
    "poolformer": (of("PoolFormerModel", **STAGES), lambda: pixels(64)),
    "swin": (of("SwinModel", **WINDOWS), lambda: pixels(32)),
    "swin v2": (of("Swinv2Model", **WINDOWS), lambda: pixels(32)),
    "donut": (of("DonutSwinModel", **WINDOWS), lambda: pixels(32)),
    "hiera": (
        of("HieraModel", image_size=[64, 64], embed_dim=32, depths=[1] * 3, num_heads=[1, 2, 4], num_query_pool=2),
        lambda: pixels(64),
    ),
    "pvt v2": (of("PvtV2Model", **STAGES, **HEADS), lambda: pixels(64)),
    "segformer": (
        of("SegformerForSemanticSegmentation", "SegformerConfig", decoder_hidden_size=64, **STAGES, **HEADS),
        lambda: pixels(64),
    ),
    "mobilevit": (
        of("MobileViTModel", hidden_sizes=[32, 40, 48], neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 64]),
        lambda: pixels(64),
    ),
    "levit": (
        of("LevitModel", image_size=64, hidden_sizes=[32, 48, 64], depths=[1] * 3, key_dim=[8] * 3),
        lambda: pixels(64),
    ),
    "sam": (
        of("SamVisionModel", "SamVisionConfig", image_size=32, patch_size=8, window_size=2, **SMALL),
        lambda: pixels(32),
    ),
    "dinov2": (of("Dinov2Model", image_size=32, patch_size=8, **SMALL), lambda: pixels(32)),
    "yolos": (of("YolosModel", image_size=[32, 32], patch_size=8, **SMALL), lambda: pixels(32)),
    "detr": (detr, lambda: pixels(64)),
    "rt-detr": (rt_detr, lambda: pixels(64)),
    "mask2former": (mask2former, lambda: pixels(32)),
    "dpt": (dpt, lambda: pixels(32)),
    "videomae": (of("VideoMAEModel", image_size=32, num_frames=4, **SMALL), lambda: pixels(32, 1, 4)),
    "wav2vec2": (of("Wav2Vec2Model", num_conv_pos_embedding_groups=4, **SOUND, **SMALL), sound),
    "unet 3d": (unet3d, lambda: noise(1, 4, 2, 8, 8, encoder_hidden_states=torch.randn(1, 7, 32))),
    "video vae": (video_vae, lambda: {"sample": torch.randn(1, 3, 3, 16, 16)}),
    "dit": (dit, latents),
}


def result_of(model: Any, inputs: Inputs) -> torch.Tensor:
    result = model(**inputs)[0]
    assert isinstance(result, torch.Tensor)
    return result


def multiplied_by_torch(model: Any, inputs: Inputs) -> int:
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    counts: dict[Any, int] = counter.get_flop_counts()["Global"]
    return sum(count for operator, count in counts.items() if not str(operator).startswith("xopt"))


@pytest.mark.parametrize("name", MODELS)
def test_as_exact_as_torch_and_on_our_kernels(name: str) -> None:
    make, make_inputs = MODELS[name]
    torch.manual_seed(0)
    source, inputs = settled(make()).requires_grad_(False), make_inputs()
    kept = {key: value.clone() for key, value in source.state_dict().items()}
    exact = result_of(copy.deepcopy(source).double(), as_dtype(inputs, torch.float64))
    whole = multiplied_by_torch(copy.deepcopy(source), inputs)
    for dtype in (torch.float32, torch.bfloat16):
        plain = result_of(copy.deepcopy(source).to(dtype), as_dtype(inputs, dtype))
        optimized = xopt.optimize(source, dtype=dtype)
        result = result_of(optimized, inputs)
        assert type(optimized) is type(source)
        assert list(optimized.state_dict()) == list(kept)
        assert result.dtype == torch.float32
        allowed = 1.1 * relative_error(plain, exact) + 8 * ROUNDING
        assert relative_error(result, exact) <= allowed, dtype
        result_of(optimized, inputs)  # some forwards can be recorded once they have set what they set
        left = multiplied_by_torch(optimized, inputs)
        assert left <= 0.05 * whole, f"{dtype}: {left / whole:.1%} of the multiply-adds are torch's"
    assert all(torch.equal(value, kept[key]) for key, value in source.state_dict().items())
