"""Where a UNet is cut for DeepCache: the layers that a skipped step leaves out, and the one whose
output it reuses.

Other architectures get a boundary of their own with the same `recording`, `skipping`, `withhold`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from ..modules.blocks import matrix_weights
from ..modules.substitution import Layer
from .config import checked_depth
from .run import BranchKey, DeepCacheRun


class OutdatedFeature(Exception):
    """The remembered feature does not fit this call, as when Kohya's Deep Shrink ends; a call in full renews it."""


DEFAULT_SHARE = 0.25
"""Largest share of the model's work that a skipped step may cost when the depth is not given.

By the estimate of `default_depth`: interval 3 then executes (1 + 2 × 0.25) / 3, half of the work. Counted,
attention included: 0.22 to 0.32 for SD1.5 (depth 2), 512² to 1024², and 0.20 to 0.23 for SDXL (depth 5), 512² to
1536². Beyond its sizes SD1.5 is dearer, 0.39 at 1536², since the shallow attention grows with the square of the
positions; its next depth, 1, would cost 0.13 there, and hires-fix keeps one depth for both of its sizes.
"""


def _layers_of(block: torch.nn.Module | None) -> list[torch.nn.Module]:
    """The layers of a block that are called one by one."""
    if block is None:
        return []
    return list(block.children()) if isinstance(block, torch.nn.Sequential) else [block]


def _pass_nothing(inner: Layer, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The first channel of `x` [B, C, ...]: the least that patches between the blocks take as they take features.
    Interpolation, as in Kohya's Deep Shrink, refuses a tensor without channels."""
    return x[:, :1]


class UNetBoundary:
    """Where a UNet is cut: `depth` input blocks and as many output blocks are shallow, the rest deep.

    `model` has `input_blocks`, `middle_block` (may be None) and as many `output_blocks`; output block
    -1 - i takes the skip of input block i. Raises ValueError for a depth outside `1 .. max_depth`.
    """

    def __init__(self, model: torch.nn.Module, depth: int | None):
        self.model = model
        self.count = len(model.input_blocks)
        self.depth = checked_depth(default_depth(model) if depth is None else depth, self.max_depth)
        first_shallow = self.count - self.depth
        blocks = [*model.input_blocks[self.depth :], model.middle_block, *model.output_blocks[:first_shallow]]
        deep = [layer for block in blocks for layer in _layers_of(block)]
        self.silent: tuple[torch.nn.Module, ...] = tuple(deep[:-1])
        """Pass nothing on a skipped step."""
        self.source: torch.nn.Module = deep[-1]
        """Its output is the feature that a full step remembers and a skipped one reuses."""
        self.first: torch.nn.Module = deep[0]
        """Its input is what the shallow part hands to the deep one."""
        self._entered: dict[BranchKey, torch.Size] = {}
        """Height and width of that input when a stream's feature was computed."""

    @property
    def max_depth(self) -> int:
        return self.count - 1

    is_settled = True
    """Whether calls of one phase do the same from now on."""

    parts = (0,)
    """Of the run's features, those that a skipped call takes."""

    @property
    def layout(self) -> Hashable:
        """Tells where the model is cut."""
        return "unet", self.depth

    def note(self, keys: Sequence[BranchKey], x: torch.Tensor) -> None:
        """`x` is what the streams' deep part is computed from."""
        self._entered.update(dict.fromkeys(keys, x.shape[2:]))

    def require(self, keys: Sequence[BranchKey], x: torch.Tensor) -> None:
        """Raises OutdatedFeature where `x` is not of the size that the streams' features were computed from."""
        for size in {self._entered.get(key) for key in keys}:
            if size != x.shape[2:]:
                raise OutdatedFeature(f"made from {size}, and {x.shape[2:]} is here")

    def recording(self, run: DeepCacheRun, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The stand-ins for a call in full."""

        def enter(inner: Layer, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.note(keys, x)
            run.measure(keys, x)
            return inner(x, *args, **kwargs)

        return {
            self.first: enter,
            self.source: lambda inner, *args, **kwargs: run.exchange(keys, inner(*args, **kwargs)),
        }

    def skipping(self, run: DeepCacheRun, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The stand-ins for a call whose deep part is skipped.

        They raise OutdatedFeature where the shallow part has another size than when the feature was remembered.
        """

        def enter(inner: Layer, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.require(keys, x)
            run.measure(keys, x)
            # Patches may work in place, and `x` is a skip of the shallow part too.
            return _pass_nothing(inner, x).clone()

        layers: dict[torch.nn.Module, Layer] = dict.fromkeys(self.silent, _pass_nothing)
        return layers | {self.first: enter, self.source: lambda inner, *args, **kwargs: run.gather(keys)}

    def withhold(self, control: Mapping[str, list] | None) -> dict[str, list] | None:
        """`control` without the residuals of deep layers; the caller's dict and lists stay as they are.

        ComfyUI's `apply_control` takes the entries from the lists' ends, one for each input block, the
        middle, and each output block, in the order in which they run.
        """
        if control is None:
            return None
        kept = {name: list(residuals) for name, residuals in control.items()}
        for name, residuals in kept.items():
            for taken in range(len(residuals)):
                deep = {
                    "input": taken >= self.depth,
                    "middle": True,
                    "output": taken < self.count - self.depth,
                }.get(name, False)
                if deep:
                    residuals[-1 - taken] = None
        return kept


def has_unet_layout(model: Any) -> bool:
    """Whether `UNetBoundary` understands the model."""
    inputs, outputs = getattr(model, "input_blocks", None), getattr(model, "output_blocks", None)
    is_list = isinstance(inputs, torch.nn.ModuleList) and isinstance(outputs, torch.nn.ModuleList)
    return is_list and len(inputs) == len(outputs) >= 2 and hasattr(model, "middle_block")


def default_depth(model: torch.nn.Module) -> int:
    """The largest depth at which a skipped step costs at most `DEFAULT_SHARE` of the work, 1 at least.

    Work is estimated as matrix weights × positions, a quarter of the positions after each layer of
    stride 2; attention's quadratic part is left out, which keeps the choice the same at every size.
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
    depth, shallow = 1, inputs[0] + outputs[0]
    while depth < len(inputs) - 1 and shallow + inputs[depth] + outputs[depth] <= DEFAULT_SHARE * total:
        shallow += inputs[depth] + outputs[depth]
        depth += 1
    return depth


def _halves(layer: torch.nn.Module) -> bool:
    stride = getattr(layer, "stride", 1)
    return max(stride) == 2 if isinstance(stride, tuple) else stride == 2
