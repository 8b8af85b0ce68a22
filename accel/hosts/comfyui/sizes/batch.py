"""Batch Snap: a LATENT padded to a batch size that graphs exist for, with the same noise for its own images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.sample
import torch

from ....core.sentences import counted
from ....sizing.fit import Restore
from .size_text import parse_numbers

LARGEST = 4096
"""Images, as in core's Empty Latent Image."""


def parse_batches(sizes: str) -> list[int]:
    """Batch sizes from text such as "1, 2, 4". Raises ValueError with one sentence on what is wrong."""
    numbers = parse_numbers(sizes, "batch sizes", LARGEST)
    if not numbers:
        raise ValueError(f"sizes is empty; write whole numbers from 1 to {LARGEST}, with commas between them: 1, 2, 4.")
    return numbers


def snap_batch(
    latent: dict[str, Any], sizes: Sequence[int], before: Restore | None, enabled: bool
) -> tuple[dict[str, Any], Restore, str]:
    """The padded LATENT, how to undo that and what `before` records, and one line for people."""
    before = before or Restore()
    padded, reason = pad_batch(latent, sizes) if enabled else (latent, "turned off")
    count, made = latent["samples"].shape[0], padded["samples"].shape[0]
    text = f"{count} → {made} images" if made != count else f"{counted(count, 'image')}, unchanged"
    # Of a batch that was padded before, only the images asked for at first count.
    asked = before.batch[0] if before.batch is not None and before.batch[1] == count else count
    record = Restore(before.fit, (asked, made) if made != asked else None)
    return padded, record, f"{text}: {reason}" if reason else text


def pad_batch(latent: dict[str, Any], sizes: Sequence[int]) -> tuple[dict[str, Any], str]:
    """The LATENT with its last image repeated up to the next of `sizes`, and the reason if it is not padded.

    The first images get the same noise as without padding, bit by bit. If core cannot draw it so, or no size is
    large enough, the LATENT is returned unchanged with the reason ("" if it is padded or has one of the sizes).
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
    # For a latent with frames, core reads a mask of fewer dimensions as one mask per frame.
    per_image = isinstance(mask, torch.Tensor) and mask.ndim > 2 and (samples.ndim < 5 or mask.ndim == samples.ndim)
    if per_image and mask.shape[0] == count:
        padded["noise_mask"] = mask[rows]
    own = latent.get("batch_index")
    # Images of one index share their noise; padding with an index of its own may need more noise to be drawn.
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

    Draws and compares, because it depends on how torch fills a tensor: 16 numbers at a time, the tail drawn again.
    """
    plain, more = (
        comfy.sample.prepare_noise_inner(batch, torch.Generator().manual_seed(0), inds)
        for batch, inds in ((samples, own), (padded, index))
    )
    return torch.equal(plain, more[: len(plain)])
