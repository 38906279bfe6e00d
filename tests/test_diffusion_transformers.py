"""The transformers of diffusion models that came after UNets: joint attention of images and texts, norms of queries and
keys, rotations in space and time. Their attention, however it is called, runs on xopt's kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xopt
from tests.families import as_dtype, calls_of

diffusers = pytest.importorskip("diffusers")
Inputs = dict[str, Any]
PATCHED = {"num_layers": 2, "in_channels": 4, "out_channels": 4}
JOINT = {"joint_attention_dim": 32, "num_attention_heads": 2, "attention_head_dim": 16}


def flux() -> tuple[Any, Inputs, int]:
    sizes = {**JOINT, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8], "num_single_layers": 2}
    model = diffusers.FluxTransformer2DModel(patch_size=1, **PATCHED, **sizes)
    places = {"img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(8, 3)}
    given = {"hidden_states": torch.randn(1, 16, 4), "pooled_projections": torch.randn(1, 32), **places}
    return model, {**given, "encoder_hidden_states": torch.randn(1, 8, 32)}, 4


def stable_diffusion_3() -> tuple[Any, Inputs, int]:
    sizes = {**JOINT, "pooled_projection_dim": 32, "caption_projection_dim": 32, "qk_norm": "rms_norm"}
    model = diffusers.SD3Transformer2DModel(sample_size=8, patch_size=2, **PATCHED, **sizes)
    given = {"hidden_states": torch.randn(1, 4, 8, 8), "pooled_projections": torch.randn(1, 32)}
    return model, {**given, "encoder_hidden_states": torch.randn(1, 5, 32)}, 2


def wan() -> tuple[Any, Inputs, int]:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 32, "freq_dim": 32, "ffn_dim": 48}
    norms = {"cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32}
    model = diffusers.WanTransformer3DModel(patch_size=(1, 2, 2), **PATCHED, **sizes, **norms)
    return model, {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 32)}, 4


def lumina() -> tuple[Any, Inputs, int]:
    heads = {"num_attention_heads": 3, "num_kv_heads": 1, "num_refiner_layers": 1}
    places = {"axes_dim_rope": (4, 2, 2), "axes_lens": (64, 64, 64)}
    sizes = {"sample_size": 8, "hidden_size": 24, "multiple_of": 2, "cap_feat_dim": 32, "num_layers": 2}
    model = diffusers.Lumina2Transformer2DModel(in_channels=4, **heads, **places, **sizes)
    given = {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 32)}
    return model, {**given, "encoder_attention_mask": torch.ones(1, 6, dtype=torch.bool)}, 4


def cogview_4() -> tuple[Any, Inputs, int]:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": 32, "time_embed_dim": 24}
    model = diffusers.CogView4Transformer2DModel(**PATCHED, **sizes, rope_axes_dim=(16, 16))
    size = torch.tensor([[64.0, 64.0]])
    sizes_of_image = {"original_size": size, "target_size": size, "crop_coords": torch.zeros(1, 2)}
    given = {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 32)}
    return model, {**given, **sizes_of_image}, 2


def ltx_video() -> tuple[Any, Inputs, int]:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 24}
    model = diffusers.LTXVideoTransformer3DModel(**PATCHED, **sizes)
    places = {"num_frames": 2, "height": 2, "width": 4, "rope_interpolation_scale": (0.32, 32, 32)}
    texts = {"encoder_hidden_states": torch.randn(1, 6, 24), "encoder_attention_mask": torch.ones(1, 6)}
    return model, {"hidden_states": torch.randn(1, 16, 4), **texts, **places}, 4


MODELS: dict[str, Callable[[], tuple[Any, Inputs, int]]] = {
    "flux": flux,
    "stable diffusion 3": stable_diffusion_3,
    "wan": wan,
    "lumina 2": lumina,
    "cogview 4": cogview_4,
    "ltx video": ltx_video,
}


def with_time(model: Any, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    sample: Tensor = model(**as_dtype(inputs, dtype), timestep=torch.tensor([1.0]).to(dtype)).sample
    return sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_attention_is_ours_and_results_no_less_exact_than_torch_s(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, inputs, attentions = MODELS[name]()
    for parameter in model.eval().parameters():
        nn.init.normal_(parameter, std=0.05) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    exact = with_time(copy.deepcopy(model).double(), inputs, torch.float64)
    own = with_time(copy.deepcopy(model).to(dtype), inputs, dtype)
    optimized = xopt.optimize(model, dtype=dtype)
    for _ in range(3):
        before = calls_of("attention")
        result = with_time(optimized, inputs, torch.float32)
        assert calls_of("attention") == before + attentions
    errors = [float((each.double() - exact).norm() / exact.norm()) for each in (result, own)]
    assert errors[0] <= 1.1 * errors[1] + 1e-6
