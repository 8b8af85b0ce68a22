"""Where a model of any architecture is cut for DeepCache."""

from __future__ import annotations

from typing import Any

from ..modules.blocks import trunk_of
from .diffusers_split import DiffusersBoundary, has_diffusers_layout
from .dit_split import DiTBoundary, has_dit_layout
from .unet_split import UNetBoundary, has_unet_layout

Boundary = UNetBoundary | DiTBoundary


def boundary_of(model: Any, depth: int | None) -> Boundary | None:
    """A boundary for one run of `model`; None when it has none of the layouts (`why_none` says what is missing).

    depth: how much of the model still runs on a skipped step; None chooses by the model. Raises
    ValueError, with the range, for a depth outside the model's.
    """
    if has_unet_layout(model):
        return UNetBoundary(model, depth)
    if has_diffusers_layout(model):
        return DiffusersBoundary(model, depth)
    if has_dit_layout(model) and not _is_unet(model):
        return DiTBoundary(model, depth)
    return None


def why_none(model: Any) -> str:
    """Why `boundary_of` the model is None, for people."""
    blocks = sum(len(found.blocks) for found in trunk_of(model))
    if blocks and _is_unet(model):
        return "it is a UNet whose skips are laid out in a way of their own"
    if blocks:
        return f"it has {blocks} blocks, and with fewer than 3 there is none to skip"
    return "it is neither a UNet with skip levels nor a transformer with one main list of blocks"


def _is_unet(model: Any) -> bool:
    """Its blocks are levels of different sizes, not a row of equal ones."""
    return hasattr(model, "up_blocks") and hasattr(model, "down_blocks")
