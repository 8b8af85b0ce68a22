"""Tiny instances of ComfyUI's own model classes with random weights, and one call to sample them.

Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

import torch

CONTEXT_DIM = 768


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights that keep activations finite: norms 1, biases small, matrices scaled by fan-in."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                fan_in = parameter[0].numel()
                values = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
            elif name.endswith("weight") or name.endswith("scale"):
                values = torch.ones(parameter.shape)
            else:
                values = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.copy_(values)


def unet_config(**changes) -> dict:
    """SD1.5's layout, 32 channels wide on three levels: 3.7 M parameters."""
    config = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 32,
        "num_res_blocks": [1, 1, 1],
        "channel_mult": [1, 2, 4],
        "transformer_depth": [1, 1, 0],
        "transformer_depth_output": [1, 1, 1, 1, 0, 0],
        "transformer_depth_middle": 1,
        "num_heads": 4,
        "use_spatial_transformer": True,
        "context_dim": CONTEXT_DIM,
        "use_linear_in_transformer": False,
        "use_temporal_attention": False,
        "legacy": False,
        "adm_in_channels": None,
    }
    config.update(changes)
    return config


def unet(seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A ModelPatcher over core's SD15 model class."""
    import comfy.model_patcher
    import comfy.supported_models

    config = comfy.supported_models.SD15(unet_config(dtype=dtype, **changes))
    model = config.get_model({}, device=torch.device("cpu"))
    randomize(model.diffusion_model, seed)
    device = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


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
    import comfy.sample

    channels = model.get_model_object("latent_format").latent_channels
    if latent is None:
        latent = torch.zeros(batch, channels, height // 8, width // 8)
    noise = comfy.sample.prepare_noise(latent, seed)
    return comfy.sample.sample(
        model,
        noise,
        steps,
        cfg,
        sampler,
        scheduler,
        positive or conditioning(tokens, seed=1),
        negative or conditioning(77, seed=2),
        latent,
        denoise=denoise,
        callback=callback,
        disable_pbar=True,
        seed=seed,
    )
