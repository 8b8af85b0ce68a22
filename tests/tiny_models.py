"""Tiny instances of ComfyUI's own model classes with random weights, and one call to sample them.

Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

import torch
from kit.tiny_models import UNET, randomize
from kit.tiny_models import sample as sample_latent

CONTEXT_DIM = 768


def unet_config(**changes) -> dict:
    """SD1.5's layout, 32 channels wide on three levels: 3.7 M parameters."""
    return {**UNET, **changes}


def unet(seed: int = 0, dtype: torch.dtype = torch.float32, inference_dtypes: tuple | None = None, **changes):
    """A ModelPatcher over core's SD15 model class.

    inference_dtypes: of the weights, and what core casts them to in each call, as where they are fp8; None casts none.
    """
    import comfy.model_patcher
    import comfy.supported_models

    if inference_dtypes is None:
        config = comfy.supported_models.SD15(unet_config(dtype=dtype, **changes))
    else:
        config = comfy.supported_models.SD15(unet_config(**changes))
        config.set_inference_dtype(*inference_dtypes)
    model = config.get_model({}, device=torch.device("cpu"))
    randomize(model.diffusion_model, seed)
    device = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


def small_unet(**changes):
    """The same on two levels and without a middle: two kinds of blocks, so that compiling takes a moment only.

    Every ResBlock changes the number of channels, as one that does not is of another kind, and attention is on the
    lower level alone: in the input block 2 and the output blocks 0 and 1. Torch before 2.11 makes graphs of their own
    for norms with one channel in a group, which no known model has but this one at its 32 channels: so 64 in tests that
    count graphs to the last.
    """
    layout = {
        "channel_mult": [1, 2],
        "num_res_blocks": [0, 1],
        "transformer_depth": [1],
        "transformer_depth_output": [0, 1, 1],
        "transformer_depth_middle": -2,
    }
    return unet(**layout | changes)


def res_blocks(**changes):
    """The same without transformers, whose tracing takes most of the time: one kind."""
    return small_unet(transformer_depth=[0], transformer_depth_output=[0, 0, 0], **changes)


def conditioning(tokens: int = 77, seed: int = 1, dim: int = CONTEXT_DIM, **extra) -> list:
    """Core's CONDITIONING with random text features: [[context [1, tokens, dim], {...}]]."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, tokens, dim, generator=generator), dict(extra)]]


def sample(
    model,
    width: int = 128,
    height: int = 128,
    batch: int = 1,
    steps: int = 3,
    seed: int = 0,
    cfg: float = 5.0,
    sampler: str = "euler",
    scheduler: str = "normal",
    tokens: int = 77,
    denoise: float = 1.0,
    positive: list | None = None,
    negative: list | None = None,
    latent: torch.Tensor | None = None,
    callback=None,
) -> torch.Tensor:
    """Run core's sampler; width and height in pixels. Returns the latent [B, C, H / 8, W / 8]."""
    if latent is None:
        channels = model.get_model_object("latent_format").latent_channels
        latent = torch.zeros(batch, channels, height // 8, width // 8)
    prompts = positive or conditioning(tokens, seed=1), negative or conditioning(77, seed=2)
    settings = (steps, cfg, sampler, scheduler, seed)
    return sample_latent(model, latent, *prompts, *settings, denoise=denoise, callback=callback)
