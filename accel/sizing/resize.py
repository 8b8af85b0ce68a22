"""Apply a `Fit` to images and latents, and undo it.

Height and width are the last two dimensions. `resample(tensor, width, height)` resizes; the host chooses the method.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .fit import Fit, fit
from .resolution import Size

Resample = Callable[[torch.Tensor, int, int], torch.Tensor]


def apply_fit(image: torch.Tensor, plan: Fit, resample: Resample, fill: float = 0.0) -> torch.Tensor:
    """An image [..., asked height, asked width] at the snapped size; the same tensor if the sizes are equal.

    fill: the value of the border that "pad constant" adds.
    """
    if plan.is_identity:
        return image
    image = _resized(image, plan.scaled, resample)
    if plan.pads:
        return _padded(image, plan, fill)
    return _cut(image, plan.left, plan.top, plan.snapped)


def undo_fit(image: torch.Tensor, plan: Fit, resample: Resample) -> torch.Tensor:
    """An image [..., H, W] of the snapped size at exactly the requested size.

    An image of another size counts as a scaled one; an image of the requested size is returned unchanged. Undoing
    only padding resizes nothing. What was cropped is lost: the rest is enlarged at its aspect ratio.
    """
    height, width = image.shape[-2:]
    size = Size(width, height)
    if size == plan.asked:
        return image
    if plan.pads:
        left, top, width, height = plan.box(size)
        image = _cut(image, left, top, Size(width, height))
    elif plan.how == "crop":
        back = fit(size, plan.asked, "crop", plan.anchor)
        return apply_fit(image, back, resample)
    return _resized(image, plan.asked, resample)


def _resized(image: torch.Tensor, size: Size, resample: Resample) -> torch.Tensor:
    if tuple(image.shape[-2:]) == (size.height, size.width):
        return image
    return resample(image, size.width, size.height)


def _cut(image: torch.Tensor, left: int, top: int, size: Size) -> torch.Tensor:
    return image[..., top : top + size.height, left : left + size.width]


def _padded(image: torch.Tensor, plan: Fit, fill: float) -> torch.Tensor:
    height, width = image.shape[-2:]
    if plan.how == "pad constant":
        padded = image.new_full((*image.shape[:-2], plan.snapped.height, plan.snapped.width), fill)
        _cut(padded, plan.left, plan.top, Size(width, height)).copy_(image)
        return padded
    source = _reflected if plan.how == "pad reflect" else lambda index, length: index.clamp(0, length - 1)
    columns = source(torch.arange(plan.snapped.width, device=image.device) - plan.left, width)
    rows = source(torch.arange(plan.snapped.height, device=image.device) - plan.top, height)
    return image.index_select(-2, rows).index_select(-1, columns)


def _reflected(index: torch.Tensor, length: int) -> torch.Tensor:
    """Indices outside of 0..length - 1 reflected, edges not repeated; any number of times, unlike torch's padding."""
    if length == 1:
        return torch.zeros_like(index)
    index = index.remainder(2 * (length - 1))
    return torch.minimum(index, 2 * (length - 1) - index)
