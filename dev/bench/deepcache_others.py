"""The caches that DeepCache is measured beside: the method that the node is named for (Ma et al., arXiv 2312.00858),
the rules of TeaCache (Liu et al., arXiv 2411.19108), First Block Cache and cache-dit (by their documents), and core's
EasyCache and LazyCache as their nodes make them.

Each decides call by call, by one number that the bench sets so that as much is skipped as by ours. Import it after
`inprocess.boot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import comfy_extras.nodes_easycache as core
import torch
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.modules.substitution import Order, substitute

from .flops import Flops

SUBSAMPLE = 1
"""Of core's caches, in place of 8, which leaves 2 by 2 places of latents as small as these."""

WARM_UP, LONGEST = 4, 3
"""Of cache-dit's rule: calls in full at the beginning, and the most to skip in a row."""

_INSIDE = {"Flux": "img_attn.qkv", "OpenAISignatureMMDITWrapper": "x_block.attn.qkv", "UNetModel": "out_layers"}
"""Class of a network → the layer of its first block that is given the picture with the noise level in it."""


class Rule:
    """Around the model's calls in one image. Each runs the first block and the last layer; a skipped one has none of
    the blocks between. Transformers' tokens get what these added to them in full calls; the last block of a UNet gets
    what they gave it, beside what the latent's convolution gives now, as in DeepCache.

    `changed` is the change of what the first block adds since the last full call, as a share in L1 norm.
    """

    is_line = looks_inside = is_counted = False
    """Whether it goes on with a line in calls; whether `changed` is of what enters the first block, since the call
    before; whether what skipped calls still run is counted: in networks of many blocks a first one is little."""

    def __init__(self, flops: Flops, threshold: float):
        self._flops, self._threshold = flops, threshold
        self._kept: list[tuple[int, torch.Tensor]] = []
        """The last two full calls, the newest first, and what they gave."""
        self._known = self._inside = self._returned = torch.zeros(())
        self._call, self._in_a_row, self._sum, self._is_last, self._skips = -1, 0, 0.0, False, False

    def skips(self, changed: float) -> bool:
        return changed < self._threshold

    def __call__(self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._is_last = bool(args[3]["sample_sigmas"][-2] >= t.max() * (1 - 1e-4))
        self._call += 1
        layers = dict(self._layers(executor.class_obj.diffusion_model))
        with self._flops.paused(lambda: self._skips and not self.is_counted), substitute(layers, Order.CACHED):
            return executor(x, t, *args, **kwargs)

    def _layers(self, network: Any) -> Iterator[tuple[torch.nn.Module, Callable[..., Any]]]:
        is_unet = hasattr(network, "input_blocks")
        if is_unet:
            parts = (*network.input_blocks[1:], network.middle_block, *network.output_blocks[:-1])
            first, *deep = (layer for part in parts for layer in part)
            last, fresh = network.output_blocks[-1][0], network.model_channels
        else:
            names = ("double_blocks", "single_blocks", "joint_blocks")
            first, *deep = (block for name in names for block in getattr(network, name, ()))
            last, fresh = network.final_layer, 0
        yield first, partial(self._run_first, first)
        yield from ((block, partial(self._run_deep, block)) for block in deep)
        yield last, partial(self._run_last, fresh)
        yield first.get_submodule(_INSIDE[type(network).__name__]), self._look_inside

    def _look_inside(self, inner: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        self._inside = x.clone()
        return inner(x)

    def _run_first(self, block: torch.nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = _picture(block, _passed(block, args, kwargs)).clone()  # a block may write to it
        out = inner(*args, **kwargs)
        self._returned = _picture(block, out).clone()
        signal = self._inside if self.looks_inside else self._returned - given
        changed = ((signal - self._known).abs().mean() / self._known.abs().mean()).item() if self._kept else 0.0
        self._skips = bool(self._kept) and self.skips(changed)
        self._in_a_row = self._in_a_row + 1 if self._skips else 0
        if self.looks_inside or not self._skips:
            self._known = signal
        return out

    def _run_deep(self, block: torch.nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _passed(block, args, kwargs) if self._skips else inner(*args, **kwargs)

    def _run_last(self, fresh: int, inner: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """fresh: channels of a UNet's that no block between has to do with, which come last."""
        deep, own = (x[:, :-fresh], x[:, -fresh:]) if fresh else (x - self._returned, self._returned)
        if not self._skips:
            self._kept = [(self._call, deep.clone()), *self._kept[:1]]
            return inner(x, *args, **kwargs)
        (last, deep), *before = self._kept
        if self.is_line and before:
            deep = deep + (deep - before[0][1]) * (self._call - last) / (last - before[0][0])
        return inner(torch.cat((deep, own), 1) if fresh else own + deep, *args, **kwargs)


def _passed(block: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the block would return if it added nothing."""
    if "txt" in kwargs:
        return kwargs["img"], kwargs["txt"]
    return args[:2] if hasattr(block, "x_block") else args[0]


def _picture(block: torch.nn.Module, out: Any) -> torch.Tensor:
    """The picture's part of what the block returns: SD3's has it behind the text's."""
    return out if isinstance(out, torch.Tensor) else out[hasattr(block, "x_block")]


class DeepCache(Rule):
    """As of Ma et al., whatever changes: full at the multiples of an interval, which may lie between whole calls."""

    is_counted = True

    def skips(self, changed: float) -> bool:
        return int(self._call / self._threshold) == int((self._call - 1) / self._threshold)


class CacheDit(Rule):
    """As First Block Cache, but for some calls at the beginning and a few in a row; goes on with a line."""

    is_line = True

    def skips(self, changed: float) -> bool:
        return self._call >= WARM_UP and self._in_a_row < LONGEST and changed < self._threshold


class TeaCache(Rule):
    """Skips until the changes come to the threshold. Without the polynomial that its authors fit to each model."""

    looks_inside = True

    def skips(self, changed: float) -> bool:
        self._sum += changed
        if self._sum < self._threshold and not self._is_last:
            return True
        self._sum = 0.0
        return False


def _by_rule(rule: type[Rule], model: Any, flops: Flops, threshold: float) -> Any:
    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "rule", rule(flops, threshold))
    return clone


def _by_node(node: Any, model: Any, flops: Flops, threshold: float) -> Any:
    defaults = {entry.id: entry.default for entry in node.define_schema().inputs if entry.id != "model"}
    clone = node.execute(model, **{**defaults, "reuse_threshold": threshold}).args[0]
    clone.model_options["transformer_options"]["easycache"].subsample_factor = SUBSAMPLE
    return clone


MADE: dict[str, Callable[[Any, Flops, float], Any]] = {
    "DeepCache of Ma et al.": partial(_by_rule, DeepCache),
    "cache-dit": partial(_by_rule, CacheDit),
    "TeaCache": partial(_by_rule, TeaCache),
    "First Block Cache": partial(_by_rule, Rule),
    "EasyCache": partial(_by_node, core.EasyCacheNode),
    "LazyCache": partial(_by_node, core.LazyCacheNode),
}
"""By each of `deepcache.OTHERS`: makes a clone of a ModelPatcher for one image, with a threshold."""
