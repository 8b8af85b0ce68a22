"""Sizes of a ComfyUI model: the layout of its latents, and the multiple of pixels that it needs.

Read from the model's structure, so that unknown families work too. `model` is always a ModelPatcher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ....sizing.resolution import Size
from ..versions import latent_scale

SAFE_FOR_ANY_UNET = 64
"""Pixels: four levels, as in the deepest Stable Diffusion UNet, at a latent scale of 8."""

# Two-dimensional formats that are not images: Stable Cascade's prior (about 42 pixels per element) and music.
_NO_IMAGE = ("SC_Prior", "ACEAudio")


@dataclass(frozen=True)
class LatentLayout:
    """A latent's layout: [B, channels, H, W], with frames before H for videos. scale: pixels a side per element."""

    channels: int = 4
    scale: int = 8
    has_frames: bool = False

    def shape(self, size: Size, batch: int) -> tuple[int, ...]:
        """The shape of `batch` empty latents of `size` pixels, one frame each in a video format."""
        frames = (1,) if self.has_frames else ()
        return (batch, self.channels, *frames, *size.latent(self.scale))


def latent_layout(model: Any) -> LatentLayout:
    """The layout of the model's latents. Raises ValueError if they are no images (audio, 3D, Cascade's prior)."""
    latent_format = model.get_model_object("latent_format")
    name = type(latent_format).__name__
    if latent_format.latent_dimensions not in (2, 3) or name in _NO_IMAGE:
        raise ValueError(
            f"This model's latents ({name}) have no width and height in whole pixels;"
            " use the empty latent node made for it."
        )
    return LatentLayout(
        latent_format.latent_channels, latent_scale(latent_format), latent_format.latent_dimensions == 3
    )


def model_multiple(model: Any) -> int:
    """The multiple of pixels at which no level of `model` rounds its size: 8 × 2^downsamplings for a UNet, patch size ×
    latent scale for a transformer, otherwise 64."""
    scale = latent_layout(model).scale
    network = model.get_model_object("diffusion_model")
    if hasattr(network, "input_blocks"):
        # Strided convolutions, or pooling.
        strides = [[getattr(part, "stride", 1) for part in block.modules()] for block in network.input_blocks]
        halvings = sum(any((one[-1] if isinstance(one, tuple) else one) > 1 for one in each) for each in strides)
        return scale * 2**halvings
    patch = _find_patch_size(network)
    return math.lcm(SAFE_FOR_ANY_UNET, scale) if patch is None else scale * patch


def family_name(model: Any) -> str:
    """Core's name for the model's family, such as `WAN21_T2V`; the network's class if it has none."""
    base = getattr(model, "model", None)
    config = getattr(base, "model_config", None)
    return type(getattr(base, "diffusion_model", base) if config is None else config).__name__


def _find_patch_size(network: Any) -> int | None:
    """Latent elements a side per token; None if the network does not say."""
    patchifier = getattr(network, "patchifier", None)
    for owner, attribute in ((network, "patch_size"), (network, "patch_spatial"), (patchifier, "patch_size")):
        size = getattr(owner, attribute, None)
        if size is not None:
            return int(size[-1]) if isinstance(size, (tuple, list)) else int(size)
    return None
