"""How DeepCache skips a model of any architecture, and what every way can do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...core.sentences import counted
from ...modules.blocks import trunk_of
from .dit import DiTSplit, has_dit_layout
from .unet import DownUpUNetSplit, UNetSplit, has_down_up_layout, has_unet_layout

Split = UNetSplit | DiTSplit
"""How the calls of one model store features and are skipped, for one run."""


def find_split(model: Any) -> Split | None:
    """A split for one run of `model`; None where it has none of the layouts (`why_no_split` says what is missing)."""
    if has_unet_layout(model):
        return UNetSplit(model)
    if has_down_up_layout(model):
        return DownUpUNetSplit(model)
    if has_dit_layout(model) and not _is_unet(model):
        return DiTSplit(model)
    return None


def numbers_kept(split: Split | None, latent: Sequence[int]) -> int:
    """How many numbers one point of the features has for latents [B, C, ...], by estimate; 0 without a split.

    For each list of blocks what enters the model's last layer: the one outside of all lists that gives least. Tokens of
    prompts and references come on top, a tenth at usual sizes.
    """
    layers = [] if split is None else list(_layers_outside_lists(split.model))
    if not layers:
        return 0
    taken, given = min(reversed(layers), key=lambda widths: widths[1])
    return math.prod(latent) * taken // given * (len(split.spans) if isinstance(split, DiTSplit) else 1)


def _layers_outside_lists(module: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """What each linear layer or convolution takes and gives, in numbers for each place."""
    for child in module.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            continue
        for names in (("in_features", "out_features"), ("in_channels", "out_channels")):
            taken, given = (getattr(child, name, None) for name in names)
            if isinstance(taken, int) and isinstance(given, int) and getattr(child, "weight", None) is not None:
                yield taken, given
        yield from _layers_outside_lists(child)


def why_no_split(model: Any) -> str:
    """Why `find_split` returns None, in words."""
    blocks = sum(len(found.blocks) for found in trunk_of(model))
    if blocks and _is_unet(model):
        return "it is a UNet whose skips are laid out in a way of their own"
    if blocks:
        return f"it has {counted(blocks, 'block')}, and with fewer than 3 there is none to skip"
    return "it is neither a UNet with skip levels nor a transformer with one main list of blocks"


def _is_unet(model: Any) -> bool:
    """Whether its blocks are levels of different sizes, not a row of equal ones."""
    return hasattr(model, "up_blocks") and hasattr(model, "down_blocks")
