"""The error message when a model fails at a size: the size, the multiple it needs, and the node that helps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ....sizing.resolution import Size, snap
from .model_sizes import latent_layout, model_multiple

_MISMATCHES = re.compile(
    r"size of tensor a \(\d+\) must match"
    r"|Sizes of tensors must match except in dimension"
    r"|expanded size of the tensor \(\d+\) must match"
    r"|shape '\[.*\]' is invalid for input of size"
    r"|Expected size \d+ but got size \d+"
    r"|output with shape \[.*\] doesn't match the broadcast shape"
    r"|can't divide axis of length"
    r"|[Kk]ernel size can't be greater than actual input size",
    re.DOTALL,
)
"""Messages of torch and einops about sizes that differ. Not "mat1 and mat2": that is a prompt for another model."""


class ShapeMismatch(RuntimeError):
    """Shapes differ, and a side of the latent is not a multiple that the model needs; the message suggests a size."""


@contextmanager
def sizes_explained(executor: Any, arguments: Sequence[Any]) -> Iterator[None]:
    """Raise ShapeMismatch in place of an OUTER_SAMPLE call's error that Resolution Snap would prevent; others pass
    through. arguments: of the call; the first is the noise, [B, C, H, W] or [B, C, T, H, W]."""
    try:
        yield
    except RuntimeError as error:
        sentence = None if isinstance(error, ShapeMismatch) else explain(error, executor, arguments)
        if sentence is None:
            raise
        raise ShapeMismatch(sentence) from error


def explain(error: RuntimeError, executor: Any, arguments: Sequence[Any]) -> str | None:
    """The sentence for a sampler's error; None if the size of the latent is not the cause."""
    said = " ".join(str(error).split())
    noise = arguments[0] if arguments else None
    if isinstance(error, torch.OutOfMemoryError) or _MISMATCHES.search(said) is None:
        return None
    if not isinstance(noise, torch.Tensor) or noise.ndim < 4:
        return None
    model = executor.class_obj.model_patcher
    try:
        scale, multiple = latent_layout(model).scale, model_multiple(model)
    except (AttributeError, ValueError):
        return None
    height, width = noise.shape[-2:]
    size = Size(width * scale, height * scale)
    right = snap(size, multiple)
    if right == size:
        return None
    if len(said) > 200:
        said = f"{said[:197]}..."
    # Many models run at such sizes anyway, and then another pack's node failed: hence "if that is why".
    return (
        f"Sampling failed at {size} pixels (a latent of {width}×{height}), whose sides are not all multiples of the"
        f" {multiple} that the model is made for ({said.rstrip('.')}): if that is why, Resolution Snap before the"
        f" sampler helps, which makes it {right}."
    )
