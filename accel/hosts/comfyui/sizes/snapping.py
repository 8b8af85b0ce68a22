"""Resolution Snap and Restore Size: an empty latent, an image or a latent at the nearest size that runs, and back.

Images and latents are stretched there and back: nothing is cut off, and a border never has to be painted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils
import torch

from ....sizing.resolution import Size, change, snap
from .model_sizes import SAFE_FOR_ANY_UNET, LatentLayout, latent_layout, model_multiple

SMALLEST, LARGEST = 16, 16384
"""Pixels a side, as in core's Empty Latent Image."""


@dataclass(frozen=True)
class Snapped:
    """What a snap gives: sizes asked for and to run at, latent and image (if any) of it, and a line for people."""

    asked: Size
    size: Size
    latent: dict[str, Any]
    image: torch.Tensor | None
    text: str


def snap_inputs(
    asked: Size,
    model: Any = None,
    image: torch.Tensor | None = None,
    latent: dict[str, Any] | None = None,
    batch_size: int = 1,
) -> Snapped:
    """The image or latent at a size that the model runs at without rounding; without either, `batch_size` empty
    latents. asked: pixels; an image [B, H, W, C] or a latent brings its own. model: a ModelPatcher; None for any UNet.
    Raises ValueError for a size out of range, and for both an image and a latent."""
    if image is not None and latent is not None:
        raise ValueError("Both an image and a latent are connected: connect only the one to snap.")
    layout = LatentLayout() if model is None else latent_layout(model)
    if image is not None:
        asked = Size(image.shape[2], image.shape[1])
    elif latent is not None:
        if model is None:
            layout = LatentLayout(scale=latent.get("downscale_ratio_spacial", layout.scale))
        asked = latent_size(latent, layout.scale)
    elif not all(SMALLEST <= side <= LARGEST for side in (asked.width, asked.height)):  # of a linked side
        nearest = Size(*(min(max(side, SMALLEST), LARGEST) for side in (asked.width, asked.height)))
        wrong = "width" if asked.width != nearest.width else "height"
        raise ValueError(
            f"{wrong} is {getattr(asked, wrong)}; it must be from {SMALLEST} to {LARGEST} pixels. "
            f"The nearest valid size is {nearest}."
        )
    size = snap(asked, math.lcm(SAFE_FOR_ANY_UNET, layout.scale) if model is None else model_multiple(model))
    if latent is None:
        empty = torch.zeros(layout.shape(size, batch_size), device=comfy.model_management.intermediate_device())
        # Newer cores rescale an empty latent for the model that samples it if they know its scale.
        latent = {"samples": empty, "downscale_ratio_spacial": layout.scale}
    snapped = snap_latent(latent, size, layout.scale)
    return Snapped(asked, size, snapped, None if image is None else resize_image(image, size), change(asked, size))


def latent_size(latent: dict[str, Any], scale: int) -> Size:
    """A LATENT's size, at `scale` pixels a side per element. Raises ValueError without height and width."""
    samples = latent["samples"]
    if getattr(samples, "is_nested", False) or samples.ndim < 4:
        raise ValueError("This latent has no height and width (sound, or several in one) and cannot be snapped.")
    return Size(samples.shape[-1] * scale, samples.shape[-2] * scale)


def snap_latent(latent: dict[str, Any], size: Size, scale: int) -> dict[str, Any]:
    """A LATENT with its mask at `size`, in pixels; the same one if it has that size."""
    if latent_size(latent, scale) == size:
        return latent
    height, width = size.latent(scale)
    # Core's best way to resize latents: it keeps their norm, where Lanczos would treat them as 8-bit colours.
    samples = comfy.utils.common_upscale(latent["samples"], width, height, "bislerp", "disabled")
    snapped = {**latent, "samples": samples.contiguous()}
    if latent.get("noise_mask") is not None:
        snapped["noise_mask"] = resize_mask(latent["noise_mask"], size)
    return snapped


def resize_mask(mask: torch.Tensor, size: Size) -> torch.Tensor:
    """A mask [..., h, w] of any resolution as one of `size`."""
    flat = mask.float().reshape(-1, 1, *mask.shape[-2:])
    resized = torch.nn.functional.interpolate(flat, (size.height, size.width), mode="bilinear")
    return resized.reshape(*mask.shape[:-2], size.height, size.width)


def resize_image(image: torch.Tensor, size: Size) -> torch.Tensor:
    """An IMAGE [B, H, W, C] at `size`; the same tensor if it has that size."""
    if tuple(image.shape[1:3]) == (size.height, size.width):
        return image
    # Core's way to resize images; it works on 8 bits a channel.
    resized = comfy.utils.common_upscale(image.movedim(-1, 1), size.width, size.height, "lanczos", "disabled")
    return resized.movedim(1, -1).contiguous()
