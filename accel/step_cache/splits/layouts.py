"""How DeepCache skips a model of any architecture, and what every way can do."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...core.sentences import counted
from ...modules.blocks import trunk_of
from ...modules.substitution import Layer
from ..features import BranchKey, Features
from .dit import DiTSplit, has_dit_layout
from .unet import DownUpUNetSplit, UNetSplit, has_down_up_layout, has_unet_layout


class Split(Protocol):
    """How the calls of one model store features and are skipped, for one run. `features` may be a FeaturesProxy."""

    model: torch.nn.Module
    parts: Sequence[Hashable]
    """The features that a skipped call reads."""
    layout: Hashable
    """Tells this split from others of the model."""
    shallow_share: float
    """Share of the model's work that a skipped call costs, by estimate."""
    takes_control: bool
    """Whether a skipped call reads what ControlNets give."""
    sees_noise: bool
    """Whether what a skipped call gives has the noise in it that the sampler has added since the last full one."""
    is_stable: bool
    """Whether calls of one phase do the same from now on."""

    def full_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The layers to substitute for a full call: they store its features."""

    def skip_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The layers to substitute for a skipped call: stored features stand for what blocks compute.

        They raise OutdatedFeature where a full call would renew the features, RuntimeError where skipping fails.
        """

    def check_done(self) -> None:
        """Raise RuntimeError where the skipped call that is over went on without a feature."""

    def withhold(self, control: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """A copy of `control` without the ControlNet residuals that a skipped call must not add."""


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
