"""Resolution Snap's work: the size chosen for what was asked for, and images, latents and masks brought to it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils
import torch

from ....cache.compiled_sizes import architecture, compiled_for
from ....cache.graph_cache import GraphCache, shared
from ....sizing.buckets import FAMILIES, TRAINED, nearest_size, nearest_trained
from ....sizing.fit import Fit, Restore
from ....sizing.resize import apply_fit, undo_batch, undo_fit
from ....sizing.resolution import Size, budget_pixels, snap
from .model_sizes import SAFE_FOR_ANY_UNET, LatentLayout, family_name, model_multiple, trained_family

FROM_MODEL = "from model"
TRAINED_SIZES = "trained sizes"
COMPILED = "already compiled"
MULTIPLES = (FROM_MODEL, "8", "16", "32", "64", TRAINED_SIZES, COMPILED)
TRAINED_FOR = (FROM_MODEL, *FAMILIES)
DEFAULT_FAMILY = "SDXL"


@dataclass(frozen=True)
class Rule:
    """What a size is snapped to: the node's settings of the same names.

    pads: the picture will be padded, so that no side may become smaller, whatever the mode.
    """

    multiple: str = FROM_MODEL
    mode: str = "nearest"
    keep_aspect: bool = False
    max_megapixels: float = 0.0
    trained_for: str = FROM_MODEL
    pads: bool = False


@dataclass(frozen=True)
class Choice:
    """The size chosen. multiple: of pixels, that both of its sides are. note: what a person should know of it."""

    size: Size
    multiple: int
    note: str = ""


def choose(
    asked: Size,
    rule: Rule,
    model: Any,
    layout: LatentLayout,
    batch: int = 1,
    cache: GraphCache = shared,
    frames: int = 1,
) -> Choice:
    """The size to run at for the one asked for.

    model: a ModelPatcher, or None where none is connected. batch, frames: of latents, for what is already compiled.

    Raises ValueError, naming a valid range, for a budget below the smallest size there is.
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
    elif rule.multiple == COMPILED:
        compiled = compiled_for(cache, None if model is None else architecture(_network(model)))
        shapes = [shape for shape in compiled.shapes if shape[0] == batch and math.prod(shape[2:-2]) == frames]
        sizes = _whole([_pixels(shape, compiled.scale) for shape in shapes], layout)
        budget = budget_pixels(rule.max_megapixels)
        sizes = [size for size in sizes if budget is None or size.pixels <= budget]
        if sizes and not compiled.any_size:
            return Choice(nearest_size(sizes, asked, mode), layout.scale, "a size that is compiled already")
        limit = "" if budget is None else f" and {rule.max_megapixels:g} megapixels"
        nothing = f"nothing is compiled yet for a batch of {batch}{limit}"
        note = "every size is compiled" if compiled.any_size else nothing
    multiple = _multiple(rule.multiple, model, layout)
    size = snap(*_sides(asked), multiple, mode, rule.keep_aspect, rule.max_megapixels)
    if note:
        note = f"{note}, so a multiple of {multiple}"
    return Choice(size, multiple, note)


def empty_latent(size: Size, batch: int, layout: LatentLayout) -> dict[str, Any]:
    """Core's LATENT of `batch` empty latents."""
    samples = torch.zeros(layout.shape(size, batch), device=comfy.model_management.intermediate_device())
    # Later cores rescale an empty latent for the model that samples it, if they know its scale.
    return {"samples": samples, "downscale_ratio_spacial": layout.scale}


def latent_size(latent: dict[str, Any], scale: int) -> Size:
    """The size in pixels of a LATENT, at `scale` pixels a side for each element.

    Raises ValueError for latents without height and width, and for several in one.
    """
    samples = latent["samples"]
    if getattr(samples, "is_nested", False) or samples.ndim < 4:
        raise ValueError("This latent has no height and width of its own (sound, or several in one); it cannot snap.")
    return _pixels(samples.shape, scale)


def snap_image(image: torch.Tensor, plan: Fit, fill: float) -> torch.Tensor:
    """An IMAGE [B, H, W, C] at the snapped size; the very same one where that is its own."""
    if plan.is_nothing:
        return image
    return apply_fit(image.movedim(-1, 1), plan, _lanczos, fill).movedim(1, -1).contiguous()


def snap_latent(latent: dict[str, Any], plan: Fit, scale: int) -> dict[str, Any]:
    """A LATENT, with its mask, at the snapped size; `plan` in pixels, all of them multiples of `scale`."""
    if plan.is_nothing:
        return latent
    snapped = {**latent, "samples": apply_fit(latent["samples"], plan.over(scale), _bislerp).contiguous()}
    mask = latent.get("noise_mask")
    if mask is not None:
        snapped["noise_mask"] = snap_mask(mask, plan)
    return snapped


def snap_mask(mask: torch.Tensor, plan: Fit) -> torch.Tensor:
    """A mask [..., h, w] over the asked size, coarser or finer as it may be, as one over the snapped size in pixels.

    What padding copies is masked as its source is, to within one element of the latent; what is filled with a
    constant is all to be painted.
    """
    mask = mask.float()
    if tuple(mask.shape[-2:]) != (plan.asked.height, plan.asked.width):
        mask = _bilinear(mask, *_sides(plan.asked))
    return apply_fit(mask, plan, _bilinear, fill=1.0)


def restore_image(image: torch.Tensor, record: Restore) -> torch.Tensor:
    """An IMAGE [B, H, W, C] as the snap's user asked for it: its exact size, and as many of them."""
    image = undo_batch(image, record)
    if record.fit is None:
        return image
    return undo_fit(image.movedim(-1, 1), record.fit, _lanczos).movedim(1, -1).contiguous()


def _multiple(chosen: str, model: Any, layout: LatentLayout) -> int:
    """Pixels; always a multiple of the latent's own scale, so that the latent has exactly this width and height."""
    if chosen.isdecimal():
        return math.lcm(int(chosen), layout.scale)
    return math.lcm(SAFE_FOR_ANY_UNET, layout.scale) if model is None else model_multiple(model)


def _whole(sizes: Iterable[Size], layout: LatentLayout) -> list[Size]:
    return [size for size in sizes if not size.width % layout.scale and not size.height % layout.scale]


def _pixels(shape: tuple[int, ...], scale: int) -> Size:
    return Size(shape[-1] * scale, shape[-2] * scale)


def _sides(size: Size) -> tuple[int, int]:
    return size.width, size.height


def _network(model: Any) -> torch.nn.Module:
    return model.get_model_object("diffusion_model")


def _lanczos(image: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """As core resizes images; it works on 8 bits a channel."""
    return comfy.utils.common_upscale(image, width, height, "lanczos", "disabled")


def _bislerp(samples: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """As core resizes latents best: their length kept, where Lanczos would take them for 8-bit colours."""
    return comfy.utils.common_upscale(samples, width, height, "bislerp", "disabled")


def _bilinear(mask: torch.Tensor, width: int, height: int) -> torch.Tensor:
    flat = mask.reshape(-1, 1, *mask.shape[-2:])
    return torch.nn.functional.interpolate(flat, (height, width), mode="bilinear").reshape(
        *mask.shape[:-2], height, width
    )
