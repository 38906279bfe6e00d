"""What Stable Diffusion spends its time in: steps of its UNet, and the decoder that makes an image of the result.

    python examples/stable_diffusion_unet.py [--size full|tiny] [--steps 4] [--dtype bfloat16|float32]

Each step goes through torch and through xopt, on the same latents. The models are made from their configurations with
random weights, so nothing is downloaded, and the image is noise. In a pipeline of your own it is two lines:

    pipeline.unet = xopt.optimize(pipeline.unet, dtype=torch.bfloat16)
    pipeline.vae = xopt.optimize(pipeline.vae, dtype=torch.bfloat16)
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel

import xopt

BLOCKS: Any = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
SMALL: Any = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
SMALL_BLOCKS: Any = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}


def make(size: str) -> tuple[Any, Any, int]:
    """UNet, VAE and the width of the latents."""
    blocks = {name: 4 * kinds for name, kinds in BLOCKS.items()}
    if size == "tiny":
        unet = UNet2DConditionModel(sample_size=8, cross_attention_dim=32, **SMALL, **SMALL_BLOCKS)
        vae = AutoencoderKL(latent_channels=4, **SMALL, **{name: 2 * kinds for name, kinds in BLOCKS.items()})
    else:  # those of Stable Diffusion 1.5
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
        channels = (128, 256, 512, 512)
        vae = AutoencoderKL(latent_channels=4, layers_per_block=2, block_out_channels=channels, **blocks)
    return unet.eval(), vae.eval(), unet.config.sample_size


def generate(unet: Any, vae: Any, latents: torch.Tensor, prompt: torch.Tensor, steps: int) -> tuple[Any, list[float]]:
    """The image, and the seconds that each step and at last the decoder took."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(steps)
    seconds = []
    for timestep in scheduler.timesteps:
        started = time.perf_counter()
        noise = unet(latents, timestep, encoder_hidden_states=prompt).sample
        seconds.append(time.perf_counter() - started)
        latents = scheduler.step(noise, timestep, latents).prev_sample
    started = time.perf_counter()
    image = vae.decode(latents).sample
    return image, [*seconds, time.perf_counter() - started]


def main() -> None:
    parser = argparse.ArgumentParser(description="Stable Diffusion's UNet and decoder, by xopt and by torch.")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    unet, vae, width = make(arguments.size)
    latents, prompt = torch.randn(1, 4, width, width), torch.randn(1, 77, unet.config.cross_attention_dim)
    dtype = getattr(torch, arguments.dtype)
    optimized = [xopt.optimize(model, dtype=dtype) for model in (unet, vae)]

    with torch.no_grad():
        expected, theirs = generate(unet, vae, latents, prompt, arguments.steps)
        generate(*optimized, latents, prompt, 1)  # blocks are fused when they are first called
        image, ours = generate(*optimized, latents, prompt, arguments.steps)

    print(xopt.report(optimized[0]))
    for name, seconds in (("torch float32", theirs), (f"xopt {arguments.dtype}", ours)):
        print(f"{name}: {1e3 * min(seconds[:-1]):.1f} ms a step at best, {1e3 * seconds[-1]:.1f} ms for the decoder")
    print(f"The images differ by {float((image - expected).norm() / expected.norm()):.1e} of their norm.")


if __name__ == "__main__":
    main()
