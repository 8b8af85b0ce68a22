"""Pictures and latents brought to the size that a model takes, and back: what a `Fit` says, done to tensors.

Height and width are the last two dimensions throughout. `resample(tensor, width, height)` resizes; which
way is the host's to say.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .fit import Fit, Restore, fit
from .resolution import Size

Resample = Callable[[torch.Tensor, int, int], torch.Tensor]


def apply_fit(picture: torch.Tensor, plan: Fit, resample: Resample, fill: float = 0.0) -> torch.Tensor:
    """A picture [..., asked height, asked width] at the snapped size; the very same tensor where that is equal.

    fill: the value of what "pad constant" adds.
    """
    if plan.is_nothing:
        return picture
    picture = _resized(picture, plan.scaled, resample)
    if plan.pads:
        return _padded(picture, plan, fill)
    return _cut(picture, plan.left, plan.top, plan.snapped)


def undo_fit(picture: torch.Tensor, plan: Fit, resample: Resample) -> torch.Tensor:
    """A picture [..., H, W] of the snapped size at exactly the size asked for.

    One of another size counts as an enlarged or shrunk one; one of the size asked for is given back as it is.
    Nothing is resized where padding is all there was to undo. What was cropped does not come back: the rest is
    enlarged, its aspect ratio kept.
    """
    height, width = picture.shape[-2:]
    size = Size(width, height)
    if size == plan.asked:
        return picture
    if plan.pads:
        left, top, width, height = plan.box(size)
        picture = _cut(picture, left, top, Size(width, height))
    elif plan.crops:
        back = fit(size, plan.asked, "crop", plan.anchor)
        return apply_fit(picture, back, resample)
    return _resized(picture, plan.asked, resample)


def undo_batch(pictures: torch.Tensor, record: Restore) -> torch.Tensor:
    """Of pictures [N, ...] the ones that were asked for; N may be a multiple of the batch, as in video."""
    if record.batch is None:
        return pictures
    asked, made = record.batch
    count = len(pictures)
    return pictures[: count // made * asked] if count % made == 0 else pictures[:asked]


def _resized(picture: torch.Tensor, size: Size, resample: Resample) -> torch.Tensor:
    if tuple(picture.shape[-2:]) == (size.height, size.width):
        return picture
    return resample(picture, size.width, size.height)


def _cut(picture: torch.Tensor, left: int, top: int, size: Size) -> torch.Tensor:
    return picture[..., top : top + size.height, left : left + size.width]


def _padded(picture: torch.Tensor, plan: Fit, fill: float) -> torch.Tensor:
    height, width = picture.shape[-2:]
    if plan.how == "pad constant":
        padded = picture.new_full((*picture.shape[:-2], plan.snapped.height, plan.snapped.width), fill)
        _cut(padded, plan.left, plan.top, Size(width, height)).copy_(picture)
        return padded
    source = _reflected if plan.how == "pad reflect" else _held
    columns = source(torch.arange(plan.snapped.width, device=picture.device) - plan.left, width)
    rows = source(torch.arange(plan.snapped.height, device=picture.device) - plan.top, height)
    return picture.index_select(-2, rows).index_select(-1, columns)


def _held(index: torch.Tensor, length: int) -> torch.Tensor:
    """Beyond the edge, the edge."""
    return index.clamp(0, length - 1)


def _reflected(index: torch.Tensor, length: int) -> torch.Tensor:
    """Beyond the edge back again, without the edge itself twice; as often as needed, unlike torch's own padding."""
    if length == 1:
        return torch.zeros_like(index)
    index = index.remainder(2 * (length - 1))
    return torch.minimum(index, 2 * (length - 1) - index)
