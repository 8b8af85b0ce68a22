"""A small VAE of ComfyUI's own classes with random weights, recognised and wrapped by its real `comfy.sd.VAE`.

Import it after `inprocess.boot`.
"""

from __future__ import annotations

import comfy.ldm.models.autoencoder
import comfy.sd
import torch

from kit.tiny_models import randomize

KL = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32} | {
    **{"ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
}
"""SD1.5's parts, 32 wide on every level: four latent channels, eight pixels each way."""


def sd15(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    """dtype None is core's choice."""
    model = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=KL, embed_dim=4)
    randomize(model, seed)
    real = comfy.sd.AutoencoderKL
    # Core recognises the layout at one width alone; newer ones take a narrower decoder for one of another layout.
    comfy.sd.AutoencoderKL = lambda ddconfig, embed_dim, **_: real(ddconfig={**ddconfig, **KL}, embed_dim=embed_dim)
    try:
        return comfy.sd.VAE(sd=dict(model.state_dict()), dtype=dtype)
    finally:
        comfy.sd.AutoencoderKL = real
