"""Text encoders with compiled blocks: a view of a CLIP, for the node Text Encoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...cache.entry import Use
from ...cache.graph_cache import GraphCache, shared
from ...core.compile_settings import CompileSettings
from ...core.events import log
from ...core.fallbacks import fallbacks
from ...core.reasons import Reason
from ...modules.blocks import is_compiled
from ...modules.substitution import Order, substitute
from ...store.graph_store import attach
from .models.accelerate import NetworkRun
from .models.streamed import clone_for_compiling
from .preferences import find_running_home
from .running_prompt import find_upstream_node
from .views import Around, make_view


def accelerate_clip(
    clip: Any, settings: CompileSettings, cache: GraphCache = shared, made_by: str | None = None
) -> Any:
    """A clone of a CLIP whose encoders' blocks run compiled, as do those of its clones, which LoRA loaders make; what
    is not like core's is returned as it is. made_by: the class of the node that shows compile progress."""
    is_clip = all(hasattr(clip, name) for name in ("clone", "patcher", "encode_from_tokens"))
    if not is_clip or not isinstance(getattr(clip, "cond_stage_model", None), torch.nn.Module):
        log.warning("%s runs uncompiled: it is not a CLIP like core's", type(clip).__name__)
        return clip
    attach(cache, find_running_home)
    view = clip.clone()
    patcher = clone_for_compiling(view.patcher, cache)
    if patcher.model is not view.patcher.model:  # loaded once more, for its weights to stay in place
        view.patcher, view.cond_stage_model = patcher, patcher.model
    return make_view(view, ("encode",), _compile_encoders(settings, cache, made_by))


def _compile_encoders(settings: CompileSettings, cache: GraphCache, made_by: str | None) -> Around:
    """What makes the context for a call of one CLIP and its clones; a function, which their deep copies share."""

    def encode(model: torch.nn.Module, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        """A call of one encoder with its blocks compiled; only now are its weights in place."""
        if kwargs.get("past_key_values") is not None:  # written word by word: a look-up each costs more
            return inner(*args, **kwargs)
        name, given = type(model).__name__, kwargs.get("embeds")
        if is_compiled(model):
            fallbacks.note(name, Reason("compiled_already"))
            return inner(*args, **kwargs)
        with cache.lease() as lease:
            if isinstance(given, torch.Tensor) and given.ndim == 3:
                lease.uses = (Use(name, (), given.shape[0], given.shape[1]),)
            run = NetworkRun(model, settings, cache, lease, find_upstream_node(made_by, "CLIP"))
            out = run.call(inner, *args, **kwargs)
            run.end()
            return out

    def around(clip: Any) -> AbstractContextManager:
        models = [getattr(part, "transformer", None) for part in clip.cond_stage_model.modules()]
        models = [model for model in models if isinstance(model, torch.nn.Module)]
        if not models:
            fallbacks.note(type(clip.cond_stage_model).__name__, Reason("no_blocks"))
        return substitute({model: functools.partial(encode, model) for model in models}, Order.CACHED)

    return around
