"""How DeepCache skips a UNet: its blocks compute nothing, and the last one hands out what is foretold of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...modules.substitution import Layer
from ..features import BranchKey, Features

_PARTS = {"resnets", "attentions", "downsamplers", "upsamplers"}
"""All that a block of a down-up UNet may consist of."""

_RESIDUALS = {
    "down_block_additional_residuals",
    "mid_block_additional_residual",
    "down_intrablock_additional_residuals",
}
"""Arguments of a down-up UNet: what ControlNets and adapters add between its blocks."""


class UNetSplit:
    """A UNet with `input_blocks`, a `middle_block` (may be None) and as many `output_blocks`."""

    is_stable = True
    """Whether calls of one phase do the same from now on."""
    parts = (0,)
    """The features that a skipped call reads."""
    layout = "unet"
    """Tells this split from others of the model."""
    shallow_share = 0.0
    """Share of the model's work that a skipped call costs, by estimate."""
    sees_noise = False
    """Whether what a skipped call gives has the noise in it that the sampler has added since the last full one."""
    takes_control = False
    """Whether a skipped call reads what ControlNets give, which is added before the last block."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        *self.silent, self.source = self._layers(model)
        """Layers that compute nothing on a skipped step; the one whose output it reuses."""

    @staticmethod
    def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
        """The layers, each called on its own, in order."""
        layers: list[torch.nn.Module] = []
        for block in (*model.input_blocks, model.middle_block, *model.output_blocks):
            layers += block.children() if isinstance(block, torch.nn.Sequential) else filter(None, [block])
        return layers

    def check_done(self) -> None:
        """Raise RuntimeError where the skipped call that is over went on without a feature. Patches have no place in
        front of the last layer."""

    def full_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The layers to substitute for a full call: they store its features. features: may be a FeaturesProxy."""
        return {
            self.source: _for_tuples(lambda inner, *args, **kwargs: features.exchange(keys, inner(*args, **kwargs)))
        }

    def skip_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The same for a skipped call: stored features stand for what blocks compute. They raise OutdatedFeature where
        a full call would renew these, RuntimeError where skipping fails."""
        layers = dict.fromkeys(self.silent, _for_tuples(_pass_nothing))
        # Patches may work in place on what the first one gives, and its `x` is the latent.
        layers[self.silent[0]] = _for_tuples(lambda *args, **kwargs: _pass_nothing(*args, **kwargs).clone())
        return {**layers, self.source: _for_tuples(lambda *args, **kwargs: features.gather(keys))}

    def withhold(self, control: Any) -> Any:
        """A copy of `control` without what a skipped call must not add."""
        return None


class DownUpUNetSplit(UNetSplit):
    """A UNet with `conv_in`, `down_blocks`, a `mid_block` (may be None) and `up_blocks`."""

    @staticmethod
    def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
        layers = [model.conv_in]
        for blocks, sampler in ((model.down_blocks, "downsamplers"), (model.up_blocks, "upsamplers")):
            for block in blocks:
                attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
                for pair in zip(block.resnets, attentions, strict=True):
                    layers += filter(None, pair)
                layers += getattr(block, sampler, None) or ()
            if blocks is model.down_blocks:
                layers += filter(None, [model.mid_block])
        return layers

    def withhold(self, control: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `control`, a call's keyword arguments, without residuals."""
        return {name: None if name in _RESIDUALS else value for name, value in control.items()}


def has_unet_layout(model: Any) -> bool:
    """Whether `UNetSplit` fits the model."""
    inputs, outputs = getattr(model, "input_blocks", None), getattr(model, "output_blocks", None)
    is_list = isinstance(inputs, torch.nn.ModuleList) and isinstance(outputs, torch.nn.ModuleList)
    return is_list and len(inputs) == len(outputs) >= 2 and hasattr(model, "middle_block")


def has_down_up_layout(model: Any) -> bool:
    """Whether `DownUpUNetSplit` fits the model.

    It does not where blocks have other parts, as in video and skip-sample models, or leave a single skip connection
    each, as those whose class names begin with K.
    """
    lists = [getattr(model, name, None) for name in ("down_blocks", "up_blocks")]
    if not all(isinstance(blocks, torch.nn.ModuleList) for blocks in lists) or not hasattr(model, "mid_block"):
        return False
    for block in [block for blocks in lists for block in blocks]:
        if not {name for name, _ in block.named_children()} <= _PARTS or type(block).__name__.startswith("K"):
            return False
        if not isinstance(getattr(block, "resnets", None), torch.nn.ModuleList):
            return False
    down, up = lists
    made = 1 + sum(len(block.resnets) + bool(getattr(block, "downsamplers", None)) for block in down)
    return made == sum(len(block.resnets) for block in up) >= 2


def _pass_nothing(inner: Layer, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The first channel of `x` [B, C, ...]: the least that patches between blocks accept as a feature.

    Interpolation, as in Kohya's Deep Shrink, refuses a tensor without channels.
    """
    return x[:, :1]


def _for_tuples(layer: Callable[..., Any]) -> Layer:
    """`layer` for modules whose caller may ask for a tuple of one, as a pipeline asks attention."""

    def adapted(inner: Layer, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_dict", True):
            return layer(inner, *args, **kwargs)
        return (layer(lambda *a, **k: inner(*a, **k)[0], *args, **kwargs),)

    return adapted
