"""The models of `bench gpu`, at full size and small: which family, in which dtype, with what prompt and latent.

Import it after `inprocess.boot`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import comfy.model_management
import comfy.supported_models
import torch
from kit import tiny_models
from kit.tiny_models import Family

from . import full_size
from .gpu_cases import Case
from .session_plan import latent_side

QUICK_SCALE = 8
"""Small models' latents are this many times smaller on each side than their pixels say."""


@dataclass(frozen=True)
class Subject:
    """family: of the model. dtype: of its weights, a name of `tiny_models.DTYPES`. tokens: of its prompt.

    frames: of its latents, None for those of pictures. scale: of their sides (`session_plan.latent_side`).
    """

    family: Family
    dtype: str
    tokens: int = 77
    frames: int | None = None
    scale: int = 1

    @property
    def has_control_net(self) -> bool:
        """Whether `Family.control_net` has one for it."""
        return self.family.model_class in ("SD15", "SDXL", "Flux")

    @property
    def has_convolutions(self) -> bool:
        """Whether its blocks have any."""
        return self.family.model_class in ("SD15", "SDXL")

    @property
    def device(self) -> torch.device:
        return comfy.model_management.get_torch_device()

    def missing(self) -> str | None:
        """One sentence where this ComfyUI does not know the model."""
        if hasattr(comfy.supported_models, self.family.model_class):
            return None
        return f"this ComfyUI has no {self.family.model_class}"

    def load(self):
        """A ModelPatcher with its weights on the device, where they stay."""
        return self.family.load(tiny_models.DTYPES[self.dtype], device=self.device)

    def latent(self, case: Case) -> torch.Tensor:
        """Empty, [B, C, (F,) H, W]; every family here has 8 pixels for one of the latent's and 4 or 16 channels."""
        channels = getattr(comfy.supported_models, self.family.model_class).latent_format.latent_channels
        sides = [latent_side(side, self.scale) for side in (case.height, case.width)]
        return torch.zeros(case.batch, channels, *([self.frames] if self.frames else []), *sides)

    def prompts(self) -> tuple[list, list]:
        """Positive and negative conditioning of the same length."""
        return self.family.conditioning(self.tokens, seed=1), self.family.conditioning(self.tokens, seed=2)


FULL = {
    "SDXL": Subject(full_size.SDXL, "fp16"),
    "SD1.5": Subject(full_size.SD15, "fp16"),
    "Flux": Subject(full_size.FLUX, "bf16", tokens=256),
    "Z-Image": Subject(full_size.Z_IMAGE, "bf16", tokens=96),
    "Qwen-Image": Subject(full_size.QWEN_IMAGE, "bf16", tokens=64, frames=1),
    "Wan": Subject(full_size.WAN, "bf16", tokens=512, frames=5),
}
"""Dtypes as core chooses them on a recent card. Wan: 5 latent frames are a clip of 17."""

_SDXL = {
    **tiny_models.UNET,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [0, 1],
    "transformer_depth_output": [0, 0, 1, 1],
    "use_linear_in_transformer": True,
    "context_dim": 64,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
}
_QWEN_IMAGE = {**full_size.QWEN_IMAGE.config, **tiny_models.QWEN_IMAGE, "num_layers": 3}
_WAN = {**tiny_models.WAN, "model_type": "t2v", "num_layers": 3}
_Z_IMAGE = {
    **full_size.Z_IMAGE.config,
    **{"dim": 288, "n_heads": 3, "n_kv_heads": 3, "n_layers": 3, "n_refiner_layers": 1},
    **{"axes_dims": [32, 32, 32], "cap_feat_dim": 48},
}

_small = {
    "SDXL": Family("SDXL", "SDXL", _SDXL, 64, 1280),
    "SD1.5": replace(tiny_models.UNET_FAMILY, name="SD1.5"),
    "Flux": Family("Flux", "Flux", {**tiny_models.FLUX, "guidance_embed": True}, 64, 32),
    "Z-Image": Family("Z-Image", "ZImage", _Z_IMAGE, 48),
    "Qwen-Image": Family("Qwen-Image", "QwenImage", _QWEN_IMAGE, 48),
    "Wan": Family("Wan", "WAN21_T2V", _WAN, 48),
}

QUICK = {
    name: replace(
        FULL[name],
        family=family,
        dtype="fp32",
        tokens=24,
        scale=QUICK_SCALE,
        frames=FULL[name].frames and min(FULL[name].frames, 2),
    )
    for name, family in _small.items()
}
