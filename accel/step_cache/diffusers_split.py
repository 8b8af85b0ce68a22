"""Where a UNet in diffusers' layout is cut for DeepCache.

The layout is read as the one that `UNetBoundary` knows. Its input blocks are `conv_in`, each resnet of
the down blocks with its attention, and each downsampler: whatever leaves a skip. Its output blocks are
each resnet of the up blocks with its attention, the last of a block with the upsampler too.

Depth d is the reference implementation's (PyPI: DeepCache 0.1.1) `cache_branch_id` d - 1 where every
down block has two resnets, as in SD and SDXL: both count skips. The reference finds its layer as
divmod(cache_branch_id, 3); with n resnets in a down block, 2 at most, block and layer are divmod(d - 1, n + 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ..modules.substitution import Layer
from .run import BranchKey, DeepCacheRun
from .unet_split import UNetBoundary

_PARTS = {"resnets", "attentions", "downsamplers", "upsamplers"}
"""All that a block of the layout may consist of."""


class DiffusersBoundary(UNetBoundary):
    """Where a UNet of diffusers is cut: the first `depth` skips, what makes and what takes them are
    shallow, the rest is deep.

    `model` has `conv_in`, `down_blocks`, `mid_block` (may be None) and `up_blocks`. Raises ValueError
    for a depth outside `1 .. max_depth`.
    """

    def __init__(self, model: torch.nn.Module, depth: int | None):
        super().__init__(_as_blocks(model), depth)
        self.model = model

    def recording(self, run: DeepCacheRun, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The stand-ins for a call in full."""
        return {module: _for_tuples(layer) for module, layer in super().recording(run, keys).items()}

    def skipping(self, run: DeepCacheRun, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The stand-ins for a call whose deep part is skipped."""
        return {module: _for_tuples(layer) for module, layer in super().skipping(run, keys).items()}

    def withhold(self, control: Mapping[str, Any]) -> dict[str, Any]:
        """`control`, a call's keyword arguments, with nothing to add in place of deep layers' residuals.

        Lists keep their lengths, since the model drops the skips beyond the last residual. The caller's
        stay as they are; an adapter's are emptied by the model itself.
        """
        kept = dict(control)
        skips = kept.get("down_block_additional_residuals")
        middle = kept.get("mid_block_additional_residual")
        adapter = kept.get("down_intrablock_additional_residuals")
        if middle is not None:
            kept["mid_block_additional_residual"] = _nothing_like(middle)
        if skips is not None:
            # Without any for the middle they are an adapter's: so it was before these had a name of their own.
            layers = self._adapted_layers() if middle is None and adapter is None else range(self.count)
            kept["down_block_additional_residuals"] = self._shallow(skips, layers)
        if adapter is not None:
            kept["down_intrablock_additional_residuals"] = self._shallow(adapter, self._adapted_layers())
        return kept

    def _shallow(self, residuals: Sequence[torch.Tensor], layers: Sequence[int]) -> list[torch.Tensor]:
        """The residuals that go to input blocks `layers`; those beyond the last layer go to the middle."""
        shallow = sum(layer < self.depth for layer in layers)
        return [*residuals[:shallow], *map(_nothing_like, residuals[shallow:])]

    def _adapted_layers(self) -> list[int]:
        """For each down block the input block whose output an adapter's residual is added to: the last
        attention, or all that a block without attention does."""
        layers, made = [], 0
        for block in self.model.down_blocks:
            resnets, downsampled = len(block.resnets), int(bool(getattr(block, "downsamplers", None)))
            has_attention = getattr(block, "has_cross_attention", False)
            layers.append(made + resnets + (0 if has_attention else downsampled))
            made += resnets + downsampled
        return layers


def has_diffusers_layout(model: Any) -> bool:
    """Whether `DiffusersBoundary` understands the model.

    Not where blocks have parts of other names, as in video and skip-sample models, nor blocks that hand
    on a single skip, whose names begin with K.
    """
    lists = [getattr(model, name, None) for name in ("down_blocks", "up_blocks")]
    if not all(isinstance(blocks, torch.nn.ModuleList) for blocks in lists) or not hasattr(model, "mid_block"):
        return False
    for block in [block for blocks in lists for block in blocks]:
        if not {name for name, _ in block.named_children()} <= _PARTS or type(block).__name__.startswith("K"):
            return False
        if not isinstance(getattr(block, "resnets", None), torch.nn.ModuleList):
            return False
    blocks = _as_blocks(model)
    return len(blocks.input_blocks) == len(blocks.output_blocks) >= 2


def _as_blocks(model: torch.nn.Module) -> SimpleNamespace:
    """The model as `UNetBoundary` knows one; its modules are the same and unchanged."""
    inputs, outputs = [[model.conv_in]], []
    for block in model.down_blocks:
        inputs += _layers_of(block)
        if getattr(block, "downsamplers", None):
            inputs.append(list(block.downsamplers))
    for block in model.up_blocks:
        layers = _layers_of(block)
        layers[-1] += getattr(block, "upsamplers", None) or ()
        outputs += layers
    sequential = [[torch.nn.Sequential(*layers) for layers in blocks] for blocks in (inputs, outputs)]
    return SimpleNamespace(input_blocks=sequential[0], middle_block=model.mid_block, output_blocks=sequential[1])


def _layers_of(block: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """What runs between a block's skips, in the order in which it runs."""
    attentions = getattr(block, "attentions", None)
    if not attentions:
        return [[resnet] for resnet in block.resnets]
    return [[resnet, attention] for resnet, attention in zip(block.resnets, attentions, strict=True)]


def _for_tuples(layer: Layer) -> Layer:
    """`layer`, also for a module that its caller asks for a tuple of one, as attention is."""

    def adapted(inner: Layer, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_dict", True):
            return layer(inner, *args, **kwargs)
        return (layer(lambda *a, **k: inner(*a, **k)[0], *args, **kwargs),)

    return adapted


def _nothing_like(residual: torch.Tensor) -> torch.Tensor:
    """A zero that can be added to a tensor of any shape."""
    return residual.new_zeros(())
