"""Resolution Snap and Resolution Restore: the size to run at, and images, latents and masks at that size and back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils
import torch

from ....sizing.buckets import FAMILIES, TRAINED, nearest_trained
from ....sizing.fit import ANCHORS, HOW, Fit, fit
from ....sizing.resize import apply_fit, undo_fit
from ....sizing.resolution import Size, snap
from .model_sizes import SAFE_FOR_ANY_UNET, LatentLayout, family_name, latent_layout, model_multiple, trained_family

FROM_MODEL = "from model"
TRAINED_SIZES = "trained sizes"
MULTIPLES = (FROM_MODEL, "8", "16", "32", "64", TRAINED_SIZES)
TRAINED_FOR = (FROM_MODEL, *FAMILIES)
DEFAULT_FAMILY = "SDXL"
SMALLEST, LARGEST = 16, 16384
"""Pixels a side, as in core's Empty Latent Image."""


@dataclass(frozen=True)
class Rule:
    """How a size is chosen: the node's inputs of the same names.

    pads: the image will be padded, so no side may get smaller, whatever the mode.
    """

    multiple: str = FROM_MODEL
    mode: str = "nearest"
    keep_aspect: bool = False
    max_megapixels: float = 0.0
    trained_for: str = FROM_MODEL
    pads: bool = False


@dataclass(frozen=True)
class Choice:
    """The size chosen. multiple: pixels that both sides are a multiple of. note: for people, how it was chosen."""

    size: Size
    multiple: int
    note: str = ""


@dataclass(frozen=True)
class Snapped:
    """What a snap gives: the size, the latent and image at that size, how to undo it, and one line for people.

    image: None if none was given.
    """

    size: Size
    latent: dict[str, Any]
    image: torch.Tensor | None
    restore: Fit
    text: str


def snap_inputs(
    asked: Size,
    model: Any = None,
    image: torch.Tensor | None = None,
    latent: dict[str, Any] | None = None,
    batch_size: int = 1,
    how: str = HOW[0],
    anchor: str = ANCHORS[0],
    fill: float = 0.0,
    **chosen_by: Any,
) -> Snapped:
    """The image or latent at a size that the model runs at without rounding; without either, an empty latent.

    asked: pixels; an image [B, H, W, C] or a latent brings its own size. model: a ModelPatcher, or None.
    batch_size: of the empty latent. how, anchor, fill: as for `fit` and `apply_fit`. chosen_by: fields of `Rule`, which
    are the nodes' other inputs.

    Raises ValueError for a size out of range, for both an image and a latent, and as `choose` does.
    """
    if image is not None and latent is not None:
        raise ValueError("Both an image and a latent are connected: connect only the one to snap.")
    layout = latent_layout(model) if model is not None else LatentLayout()
    unit = 1
    if image is not None:
        asked = Size(image.shape[2], image.shape[1])
    elif latent is not None:
        unit = layout.scale if model is not None else latent.get("downscale_ratio_spacial", layout.scale)
        layout = LatentLayout(layout.channels, unit, layout.has_frames)
        asked = latent_size(latent, unit)
    else:
        _check_range(asked)  # a linked side is only known now
    rule = Rule(**chosen_by, pads=how.startswith("pad"))
    chosen = choose(asked, rule, model, layout)
    plan = fit(asked, chosen.size, how, anchor, unit, chosen.multiple)
    return Snapped(
        chosen.size,
        empty_latent(chosen.size, batch_size, layout) if latent is None else snap_latent(latent, plan, unit),
        None if image is None else snap_image(image, plan, fill),
        plan,
        f"{plan.summary()} ({chosen.note})" if chosen.note else plan.summary(),
    )


def choose(asked: Size, rule: Rule, model: Any, layout: LatentLayout) -> Choice:
    """The size to run at, given the one asked for.

    model: a ModelPatcher, or None if none is connected.

    Raises ValueError, naming a valid range, for a budget below the smallest size.
    """
    mode = "up" if rule.pads else rule.mode
    note = ""
    if rule.multiple == TRAINED_SIZES:
        family = trained_family(model) if model is not None and rule.trained_for == FROM_MODEL else rule.trained_for
        family = DEFAULT_FAMILY if family == FROM_MODEL else family
        sizes = _whole(TRAINED.get(family, ()), layout)
        if sizes:
            size = nearest_trained(sizes, asked, mode, rule.max_megapixels)
            return Choice(size, layout.scale, f"a size that {family} was trained at")
        note = f"no trained sizes are known for {family_name(model) if family is None else family}"
    multiple = _multiple(rule.multiple, model, layout)
    size = snap(*_sides(asked), multiple, mode, rule.keep_aspect, rule.max_megapixels)
    if note:
        note = f"{note}, so a multiple of {multiple}"
    return Choice(size, multiple, note)


def empty_latent(size: Size, batch: int, layout: LatentLayout) -> dict[str, Any]:
    """Core's LATENT of `batch` empty latents."""
    samples = torch.zeros(layout.shape(size, batch), device=comfy.model_management.intermediate_device())
    # Newer cores rescale an empty latent for the model that samples it if they know its scale.
    return {"samples": samples, "downscale_ratio_spacial": layout.scale}


def latent_size(latent: dict[str, Any], scale: int) -> Size:
    """The size in pixels of a LATENT, at `scale` pixels a side per element.

    Raises ValueError for latents without height and width, and for nested ones.
    """
    samples = latent["samples"]
    if getattr(samples, "is_nested", False) or samples.ndim < 4:
        raise ValueError("This latent has no height and width (sound, or several in one) and cannot be snapped.")
    return _pixels(samples.shape, scale)


def snap_image(image: torch.Tensor, plan: Fit, fill: float) -> torch.Tensor:
    """An IMAGE [B, H, W, C] at the snapped size; the same tensor if it has that size."""
    if plan.is_identity:
        return image
    return apply_fit(image.movedim(-1, 1), plan, _lanczos, fill).movedim(1, -1).contiguous()


def snap_latent(latent: dict[str, Any], plan: Fit, scale: int) -> dict[str, Any]:
    """A LATENT with its mask at the snapped size; `plan` is in pixels, all multiples of `scale`."""
    if plan.is_identity:
        return latent
    snapped = {**latent, "samples": apply_fit(latent["samples"], plan.over(scale), _bislerp).contiguous()}
    mask = latent.get("noise_mask")
    if mask is not None:
        snapped["noise_mask"] = snap_mask(mask, plan)
    return snapped


def snap_mask(mask: torch.Tensor, plan: Fit) -> torch.Tensor:
    """A mask [..., h, w] of any resolution over the asked size, as a mask over the snapped size in pixels.

    What padding copies has the mask of its source, to within one latent element; what is filled with a constant is
    all painted.
    """
    mask = mask.float()
    if tuple(mask.shape[-2:]) != (plan.asked.height, plan.asked.width):
        mask = _bilinear(mask, *_sides(plan.asked))
    return apply_fit(mask, plan, _bilinear, fill=1.0)


def restore_image(image: torch.Tensor, plan: Fit) -> tuple[torch.Tensor, str]:
    """An IMAGE [B, H, W, C] in the size that was asked for before snapping, and one line for people."""
    restored = undo_fit(image.movedim(-1, 1), plan, _lanczos).movedim(1, -1).contiguous()
    before, after = (Size(shape[2], shape[1]) for shape in (image.shape, restored.shape))
    return restored, f"{after}, as it was" if before == after else f"{before} → {after}"


def _multiple(chosen: str, model: Any, layout: LatentLayout) -> int:
    """Pixels; a multiple of the latent scale, so that the latent has exactly this width and height."""
    if chosen.isdecimal():
        return math.lcm(int(chosen), layout.scale)
    return math.lcm(SAFE_FOR_ANY_UNET, layout.scale) if model is None else model_multiple(model)


def _check_range(asked: Size) -> None:
    for name, value in zip(("width", "height"), _sides(asked), strict=True):
        if not SMALLEST <= value <= LARGEST:
            nearest = "×".join(str(min(max(side, SMALLEST), LARGEST)) for side in _sides(asked))
            raise ValueError(
                f"{name} is {value}; it must be from {SMALLEST} to {LARGEST} pixels. The nearest valid size is"
                f" {nearest}."
            )


def _whole(sizes: Iterable[Size], layout: LatentLayout) -> list[Size]:
    return [size for size in sizes if not size.width % layout.scale and not size.height % layout.scale]


def _pixels(shape: tuple[int, ...], scale: int) -> Size:
    return Size(shape[-1] * scale, shape[-2] * scale)


def _sides(size: Size) -> tuple[int, int]:
    return size.width, size.height


def _lanczos(image: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """Core's way to resize images; it works on 8 bits a channel."""
    return comfy.utils.common_upscale(image, width, height, "lanczos", "disabled")


def _bislerp(samples: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """Core's best way to resize latents: keeps their norm, where Lanczos would treat them as 8-bit colours."""
    return comfy.utils.common_upscale(samples, width, height, "bislerp", "disabled")


def _bilinear(mask: torch.Tensor, width: int, height: int) -> torch.Tensor:
    flat = mask.reshape(-1, 1, *mask.shape[-2:])
    return torch.nn.functional.interpolate(flat, (height, width), mode="bilinear").reshape(
        *mask.shape[:-2], height, width
    )
