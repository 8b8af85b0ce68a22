"""Batch Snap's work: a LATENT padded to a batch that graphs exist for, its own images' noise unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.sample
import torch


def pad_batch(latent: dict[str, Any], sizes: Sequence[int]) -> tuple[dict[str, Any], str]:
    """The LATENT with its last image repeated up to the next of `sizes`, and why it was not padded.

    The first images get the noise that they get unpadded, bit by bit; where ComfyUI can not be told so, or no size
    is large enough, the LATENT comes back as it is, with the reason ("" where it is padded or of a right size).
    """
    samples = latent["samples"]
    if getattr(samples, "is_nested", False):
        return latent, "it is several latents in one"
    count = samples.shape[0]
    larger = [size for size in sizes if size >= count]
    if not larger:
        return latent, f"more than {max(sizes)}"
    if min(larger) == count:
        return latent, ""
    rows = [*range(count), *[count - 1] * (min(larger) - count)]
    padded = {**latent, "samples": samples[rows]}
    mask = latent.get("noise_mask")
    # For a latent with frames, core takes a mask of fewer dimensions for one that changes from frame to frame.
    per_image = isinstance(mask, torch.Tensor) and mask.ndim > 2 and (samples.ndim < 5 or mask.ndim == samples.ndim)
    if per_image and mask.shape[0] == count:
        padded["noise_mask"] = mask[rows]
    own = latent.get("batch_index")
    # Images of one index share their noise; padding that has an index of its own may cost more of it to be drawn.
    for index in ([own[row] for row in rows],) if own is not None else (rows, None):
        if _same_noise(samples, own, padded["samples"], index):
            padded.pop("batch_index", None)
            if index is not None:
                padded["batch_index"] = index
            return padded, ""
    return latent, "at this size ComfyUI's noise for the last image depends on the batch"


def _same_noise(
    samples: torch.Tensor, own: Sequence[int] | None, padded: torch.Tensor, index: Sequence[int] | None
) -> bool:
    """Whether core draws the same noise for the first images of `padded` as for `samples`.

    Drawn and compared, since it depends on how torch fills a tensor: in runs of 16 numbers, the end drawn anew.
    """
    plain, more = (
        comfy.sample.prepare_noise_inner(batch, torch.Generator().manual_seed(0), inds)
        for batch, inds in ((samples, own), (padded, index))
    )
    return torch.equal(plain, more[: len(plain)])
