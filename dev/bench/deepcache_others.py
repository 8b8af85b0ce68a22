"""The rules by which other caches skip, on the layers by which ours does: TeaCache's (Liu et al., arXiv 2411.19108),
First Block Cache's and cache-dit's (by their documents); core's EasyCache and LazyCache as their nodes make them.

Each decides call by call, by how much something has changed since another call, in L1 norm. What decides how often is
one threshold, which the bench sets so that as much is skipped as by ours. Import it after `inprocess.boot`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import comfy_extras.nodes_easycache as core
import torch
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.splits.layouts import find_split

from .flops import Flops

SUBSAMPLE = 1
"""Of core's caches, in place of 8, which leaves 2 by 2 places of latents as small as these."""

WARM_UP, LONGEST = 4, 3
"""Of cache-dit's rule: calls in full at the beginning, and the most to skip in a row."""

_FIRST_BLOCKS: dict[str, tuple[str, str, Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "Flux": ("double_blocks.0", "img_attn.qkv", lambda args, kwargs: kwargs["img"], lambda out: out[0]),
    "OpenAISignatureMMDITWrapper": (
        *("joint_blocks.0", "x_block.attn.qkv"),
        *(lambda args, kwargs: args[1], lambda out: out[1]),
    ),
    "UNetModel": ("input_blocks.1.0", "out_layers", lambda args, kwargs: args[0], lambda out: out),
}
"""Class of a network → its first block, the layer in it that is given the picture's tokens with the noise level in
them, and these tokens among what the block is given and returns."""


class _Seen(Exception):
    """Ends a call as soon as its signal is there."""


class _Kept(dict):
    """What full calls give, by part of the split, in place of a run's Features: the last, or on a line the next."""

    call, is_line = 0, False

    def exchange(self, keys: Any, feature: torch.Tensor, part: Any = 0, owned: bool = False) -> torch.Tensor:
        self[part] = [(self.call, feature.clone()), *self.get(part, [])[:1]]
        return feature

    def gather(self, keys: Any, part: Any = 0) -> torch.Tensor:
        (last, newest), *before = self[part]
        if not self.is_line or not before:
            return newest.clone()
        return newest + (newest - before[0][1]) * (self.call - last) / (last - before[0][0])

    def cannot_keep(self, error: Exception) -> None:
        raise error


class Rule:
    """Around the model's calls in one image. `changed` is the signal's change since `known`, a share of that."""

    is_line = False
    runs_first = True
    """Whether a skipped call runs the first block, by what it adds the rule decides."""

    def __init__(self, flops: Flops, threshold: float):
        self._flops, self._threshold, self._kept = flops, threshold, _Kept()
        self._kept.is_line = self.is_line
        self._split: Any = None
        self._known: torch.Tensor | None = None
        self._in_a_row, self._sum = 0, 0.0

    def skips(self, changed: float, signal: torch.Tensor, is_last: bool) -> bool:
        return changed < self._threshold

    def __call__(self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        network, options = executor.class_obj.diffusion_model, args[3]
        self._split = self._split or self._made_split(network)
        with self._flops.paused():
            signal = self._signal(network, lambda: executor(x, t, *args, **kwargs))
        changed = float("inf") if self._known is None else _change(signal, self._known)
        is_last = bool(options["sample_sigmas"][-2] >= t.max() * (1 - 1e-4))
        skips = self._known is not None and self.skips(changed, signal, is_last)
        self._in_a_row = self._in_a_row + 1 if skips else 0
        if not skips or not self.runs_first:
            self._known = signal
        layers = self._split.skip_layers if skips else self._split.full_layers
        with ExitStack() as around:
            if skips:
                around.enter_context(self._flops.paused())
            around.enter_context(substituted(layers(self._kept, [SimpleNamespace(shape=x.shape)]), Order.CACHED))
            out = executor(x, t, *args, **kwargs)
        self._kept.call += 1
        return out

    def _made_split(self, network: torch.nn.Module) -> Any:
        split = find_split(network)
        if self.runs_first and hasattr(split, "spans"):
            span = split.spans[0]
            span.blocks = span.blocks[1:]
            span.first = span.blocks[0]
        elif self.runs_first:
            split.silent = split.silent[2:]
        return split

    def _signal(self, network: torch.nn.Module, call: Callable[[], Any]) -> torch.Tensor:
        block, layer, before, after = _FIRST_BLOCKS[type(network).__name__]
        seen: list[torch.Tensor] = []
        hooks = []

        def see_given(module: Any, args: Any, kwargs: Any) -> None:
            seen.append((before(args, kwargs) if self.runs_first else args[0]).clone())  # a block may write to it
            if not self.runs_first:
                raise _Seen

        def see_returned(module: Any, args: Any, out: Any) -> None:
            seen.append(after(out) - seen.pop())
            raise _Seen

        module = network.get_submodule(block if self.runs_first else f"{block}.{layer}")
        hooks = [module.register_forward_pre_hook(see_given, with_kwargs=True)]
        hooks += [module.register_forward_hook(see_returned)]
        try:
            call()
        except _Seen:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return seen[0]


def _change(signal: torch.Tensor, known: torch.Tensor) -> float:
    return ((signal - known).abs().mean() / known.abs().mean()).item()


class FirstBlockCache(Rule):
    """Skips where what the first block adds is as in the last full call."""


class CacheDit(Rule):
    """So does this, but for some calls at the beginning and a few in a row; goes on with a line in steps."""

    is_line = True

    def skips(self, changed: float, signal: torch.Tensor, is_last: bool) -> bool:
        return self._kept.call >= WARM_UP and self._in_a_row < LONGEST and changed < self._threshold


class TeaCache(Rule):
    """Skips until the changes from call to call of what enters the first block come to the threshold. Without the
    polynomial that its authors fit to each model."""

    runs_first = False

    def skips(self, changed: float, signal: torch.Tensor, is_last: bool) -> bool:
        self._sum += changed
        if self._sum < self._threshold and not is_last:
            return True
        self._sum = 0.0
        return False


def _ruled(rule: type[Rule]) -> Callable[[Any, Flops, float], Any]:
    def made(model: Any, flops: Flops, threshold: float) -> Any:
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "rule", rule(flops, threshold))
        return clone

    return made


def _of_core(node: Any) -> Callable[[Any, Flops, float], Any]:
    def made(model: Any, flops: Flops, threshold: float) -> Any:
        defaults = {entry.id: entry.default for entry in node.define_schema().inputs if entry.id != "model"}
        clone = node.execute(model, **{**defaults, "reuse_threshold": threshold}).args[0]
        clone.model_options["transformer_options"]["easycache"].subsample_factor = SUBSAMPLE
        return clone

    return made


MADE: dict[str, Callable[[Any, Flops, float], Any]] = {
    "cache-dit": _ruled(CacheDit),
    "TeaCache": _ruled(TeaCache),
    "First Block Cache": _ruled(FirstBlockCache),
    "EasyCache": _of_core(core.EasyCacheNode),
    "LazyCache": _of_core(core.LazyCacheNode),
}
"""By each of `deepcache.OTHERS`: makes a clone of a ModelPatcher for one image, with a threshold."""
