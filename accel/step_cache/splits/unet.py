"""Where a UNet is split for DeepCache: the layers that a skipped step leaves out, and the output that it reuses."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

from ...modules.blocks import matrix_weights
from ...modules.substitution import Layer
from ..config import checked_depth
from ..features import BranchKey, Features, OutdatedFeature

NOISE_SHARE = 0.25
"""Largest share of the model's work that a skipped step may cost when no depth is given and the sampler adds noise, as
`noise_depth` estimates.

The noise that a step adds to the latent is seen by these layers alone: without them images of the trained UNet are 10
to 15 dB worse with one that does. With other samplers no layer needs to run: at the same plan images are as close,
and skipping costs nothing.

Interval 3 then executes (1 + 2 × 0.25) / 3, half of the work. Measured with attention: 0.22 to 0.32 for SD1.5 (depth
2) at 512² to 1024², 0.20 to 0.23 for SDXL (depth 5) at 512² to 1536². Above that SD1.5 costs more, 0.39 at 1536²,
since shallow attention grows with the square of the positions. Its next depth, 1, would cost 0.13 there, but both
sizes of a hires fix keep one depth.
"""

_PARTS = {"resnets", "attentions", "downsamplers", "upsamplers"}
"""All that a block of a down-up UNet may consist of."""


def _layers_of(block: torch.nn.Module | None) -> list[torch.nn.Module]:
    """The layers of a block, each called on its own."""
    if block is None:
        return []
    return list(block.children()) if isinstance(block, torch.nn.Sequential) else [block]


def _pass_nothing(inner: Layer, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The first channel of `x` [B, C, ...]: the least that patches between blocks accept as a feature.

    Interpolation, as in Kohya's Deep Shrink, refuses a tensor without channels.
    """
    return x[:, :1]


class UNetSplit:
    """A UNet split with `depth` shallow input blocks and as many shallow output blocks; the rest is deep. Without a
    depth all of it is, or what `NOISE_SHARE` allows where the sampler adds noise.

    `model` has `input_blocks`, `middle_block` (may be None) and as many `output_blocks`; output block -1 - i takes the
    skip connection of input block i. Raises ValueError for a depth outside `1 .. max_depth`.
    """

    def __init__(self, model: torch.nn.Module, depth: int | None, adds_noise: bool = True):
        self.model = model
        self.count = len(model.input_blocks)
        shares = [0.0, *shallow_shares(model)]
        if depth is None:
            self.depth = noise_depth(shares) if adds_noise else 0
        else:
            self.depth = checked_depth(depth, self.max_depth)
        self.shallow_share = shares[self.depth]
        first_shallow = self.count - self.depth
        blocks = [*model.input_blocks[self.depth :], model.middle_block, *model.output_blocks[:first_shallow]]
        deep = [layer for block in blocks for layer in _layers_of(block)]
        self.silent: tuple[torch.nn.Module, ...] = tuple(deep[:-1])
        """Layers that compute nothing on a skipped step."""
        self.source: torch.nn.Module = deep[-1]
        """The layer whose output a full step stores and a skipped one reuses."""
        self.first: torch.nn.Module = deep[0]
        """The layer whose input the shallow part hands to the deep one."""
        self._entered: dict[BranchKey, torch.Size] = {}
        """Height and width of that input when a branch's feature was computed."""

    @property
    def max_depth(self) -> int:
        return self.count - 1

    is_stable = True
    parts = (0,)

    @property
    def layout(self) -> Hashable:
        return "unet", self.depth

    @property
    def takes_control(self) -> bool:
        """Residuals are added before the last output block, all of which is deep without a shallow part."""
        return self.depth > 0

    def note_full(self, keys: Sequence[BranchKey], shape: torch.Size) -> None:
        self._entered.update(dict.fromkeys(keys, shape[2:]))

    def check_skipped(self, keys: Sequence[BranchKey], shape: torch.Size) -> None:
        # Without a shallow part it is the latent itself, whose size is in the keys.
        for size in {self._entered.get(key) for key in keys} if self.depth else ():
            if size != shape[2:]:
                raise OutdatedFeature(f"made from {size}, and {shape[2:]} is here")

    def check_done(self) -> None:
        """Do nothing: patches have no place in front of the last deep layer."""

    def full_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        def enter(inner: Layer, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            features.enter(x.shape)
            self.note_full(keys, x.shape)
            return inner(x, *args, **kwargs)

        return {
            self.first: enter,
            self.source: lambda inner, *args, **kwargs: features.exchange(keys, inner(*args, **kwargs)),
        }

    def skip_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        def enter(inner: Layer, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            features.enter(x.shape)
            self.check_skipped(keys, x.shape)
            # Patches may work in place, and `x` is also a skip connection of the shallow part.
            return _pass_nothing(inner, x).clone()

        layers: dict[torch.nn.Module, Layer] = dict.fromkeys(self.silent, _pass_nothing)
        return layers | {self.first: enter, self.source: lambda inner, *args, **kwargs: features.gather(keys)}

    def withhold(self, control: Mapping[str, list] | None) -> dict[str, list] | None:
        """A copy of `control` without the residuals of deep layers.

        The model pops entries off the lists' ends: one for each input block, the middle and each output block, in the
        order in which they run.
        """
        if control is None:
            return None
        kept = {name: list(residuals) for name, residuals in control.items()}
        for name, residuals in kept.items():
            for taken in range(len(residuals)):
                is_deep = {"input": taken >= self.depth, "middle": True, "output": taken < self.count - self.depth}
                if is_deep.get(name):
                    residuals[-1 - taken] = None
        return kept


def has_unet_layout(model: Any) -> bool:
    """Whether `UNetSplit` fits the model."""
    inputs, outputs = getattr(model, "input_blocks", None), getattr(model, "output_blocks", None)
    is_list = isinstance(inputs, torch.nn.ModuleList) and isinstance(outputs, torch.nn.ModuleList)
    return is_list and len(inputs) == len(outputs) >= 2 and hasattr(model, "middle_block")


def noise_depth(shares: Sequence[float]) -> int:
    """The largest depth at which a skipped step costs at most `NOISE_SHARE` of the work; at least 1. shares: at depth
    0, 1, ..."""
    return max((depth for depth, share in enumerate(shares[1:-1], 1) if share <= NOISE_SHARE), default=1)


def shallow_shares(model: torch.nn.Module) -> list[float]:
    """The share of the work that a skipped step costs at depth 1, 2, ... by estimate.

    Work is estimated as matrix weights × positions, with a quarter of the positions after each layer of stride 2. The
    quadratic part of attention is left out, so the shares are the same at every size.
    """
    positions, inputs, areas = 1.0, [], []
    for block in model.input_blocks:
        inputs.append(0.0)
        for layer in _layers_of(block):
            if any(_halves(part) for part in layer.modules()):
                positions /= 4
            inputs[-1] += matrix_weights(layer) * positions
        areas.append(positions)
    outputs = [matrix_weights(block) * area for block, area in zip(reversed(model.output_blocks), areas, strict=True)]
    middle = sum(matrix_weights(layer) for layer in _layers_of(model.middle_block)) * positions
    total = sum(inputs) + middle + sum(outputs)
    return [shallow / max(total, 1) for shallow in accumulate(map(sum, zip(inputs, outputs, strict=True)))]


def _halves(layer: torch.nn.Module) -> bool:
    stride = getattr(layer, "stride", 1)
    return max(stride) == 2 if isinstance(stride, tuple) else stride == 2


class DownUpUNetSplit(UNetSplit):
    """A UNet of down and up blocks, split so that the first `depth` skip connections are shallow, with the layers that
    make and take them.

    `model` has `conv_in`, `down_blocks`, `mid_block` (may be None) and `up_blocks`. It is read in the layout of
    `UNetSplit`: an input block is whatever leaves a skip connection (`conv_in`, a resnet of a down block with its
    attention, a downsampler), an output block a resnet of an up block with its attention, the last one with the
    upsampler too.

    Depth d is the reference implementation's (PyPI: DeepCache 0.1.1) `cache_branch_id` d - 1 where every down block
    has two resnets, as in SD and SDXL. The reference finds its layer as divmod(cache_branch_id, 3); with n resnets in
    a down block, 2 at most, block and layer are divmod(d - 1, n + 1).

    Raises ValueError for a depth outside `1 .. max_depth`.
    """

    def __init__(self, model: torch.nn.Module, depth: int | None, adds_noise: bool = True):
        super().__init__(_as_blocks(model), depth, adds_noise)
        self.model = model

    def full_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        return {module: _for_tuples(layer) for module, layer in super().full_layers(features, keys).items()}

    def skip_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        return {module: _for_tuples(layer) for module, layer in super().skip_layers(features, keys).items()}

    def withhold(self, control: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `control`, a call's keyword arguments, with zeros in place of deep layers' residuals.

        Lists keep their lengths, since the model drops the skip connections beyond the last residual. The model
        empties an adapter's list itself.
        """
        kept = dict(control)
        skips = kept.get("down_block_additional_residuals")
        middle = kept.get("mid_block_additional_residual")
        adapter = kept.get("down_intrablock_additional_residuals")
        if middle is not None:
            kept["mid_block_additional_residual"] = _nothing_like(middle)
        if skips is not None:
            # Without one for the middle they are an adapter's, from before these had an argument of their own.
            layers = self._adapted_layers() if middle is None and adapter is None else range(self.count)
            kept["down_block_additional_residuals"] = self._shallow(skips, layers)
        if adapter is not None:
            kept["down_intrablock_additional_residuals"] = self._shallow(adapter, self._adapted_layers())
        return kept

    def _shallow(self, residuals: Sequence[torch.Tensor], layers: Sequence[int]) -> list[torch.Tensor]:
        """The residuals of input blocks `layers`, zeros for deep ones; those beyond the last layer are the middle's."""
        shallow = sum(layer < self.depth for layer in layers)
        return [*residuals[:shallow], *map(_nothing_like, residuals[shallow:])]

    def _adapted_layers(self) -> list[int]:
        """For each down block the input block to whose output an adapter's residual is added: the one with the last
        attention, or the last one of a block without attention."""
        layers, made = [], 0
        for block in self.model.down_blocks:
            resnets, downsampled = len(block.resnets), int(bool(getattr(block, "downsamplers", None)))
            has_attention = getattr(block, "has_cross_attention", False)
            layers.append(made + resnets + (0 if has_attention else downsampled))
            made += resnets + downsampled
        return layers


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
    blocks = _as_blocks(model)
    return len(blocks.input_blocks) == len(blocks.output_blocks) >= 2


def _as_blocks(model: torch.nn.Module) -> SimpleNamespace:
    """The model in the layout of `UNetSplit`, with the same modules."""
    inputs, outputs = [[model.conv_in]], []
    for block in model.down_blocks:
        inputs += _layers_between_skips(block)
        if getattr(block, "downsamplers", None):
            inputs.append(list(block.downsamplers))
    for block in model.up_blocks:
        layers = _layers_between_skips(block)
        layers[-1] += getattr(block, "upsamplers", None) or ()
        outputs += layers
    sequential = [[torch.nn.Sequential(*layers) for layers in blocks] for blocks in (inputs, outputs)]
    return SimpleNamespace(input_blocks=sequential[0], middle_block=model.mid_block, output_blocks=sequential[1])


def _layers_between_skips(block: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """The layers between a block's skip connections, in the order in which they run."""
    attentions = getattr(block, "attentions", None)
    if not attentions:
        return [[resnet] for resnet in block.resnets]
    return [[resnet, attention] for resnet, attention in zip(block.resnets, attentions, strict=True)]


def _for_tuples(layer: Layer) -> Layer:
    """`layer` for modules whose caller may ask for a tuple of one, as attention."""

    def adapted(inner: Layer, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_dict", True):
            return layer(inner, *args, **kwargs)
        return (layer(lambda *a, **k: inner(*a, **k)[0], *args, **kwargs),)

    return adapted


def _nothing_like(residual: torch.Tensor) -> torch.Tensor:
    """A zero that broadcasts to any shape."""
    return residual.new_zeros(())
