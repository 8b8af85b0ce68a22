"""Text encoders with compiled blocks: a view of a CLIP, for Accelerate Text Encoder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...cache.entry import Use
from ...cache.graph_cache import GraphCache, shared
from ...core.compile_settings import CompileSettings, Trouble
from ...core.events import log
from ...core.fallbacks import fallbacks
from ...core.reasons import Reason
from ...modules.blocks import is_compiled
from ...modules.substitution import Order, substituted
from ...store.graph_store import attach
from .home import running_home
from .models.accelerate import block_layers, count_kinds
from .models.streamed import clone_for_compiling, stays_in_place
from .progress import CompileProgress
from .versions import leading_node
from .views import as_view

_CALLS = ("encode", "generate")
"""Prefixes of the methods that run a CLIP."""


def accelerate_clip(
    clip: Any, settings: CompileSettings, cache: GraphCache = shared, made_by: str | None = None
) -> Any:
    """A clone of a CLIP whose encoders' blocks run compiled, and those of its clones, which LoRA loaders make.

    The given CLIP is unchanged; what is not made like core's is returned as it is.
    made_by: the class of the node that shows compile progress.
    """
    is_clip = all(hasattr(clip, name) for name in ("clone", "patcher", "encode_from_tokens"))
    if not is_clip or not isinstance(getattr(clip, "cond_stage_model", None), torch.nn.Module):
        log.warning("%s runs uncompiled: it is not a CLIP like core's", type(clip).__name__)
        return clip
    attach(cache, running_home)
    view = clip.clone()
    if stays_in_place(view.patcher, cache):
        view.patcher = clone_for_compiling(view.patcher, cache)
        view.cond_stage_model = view.patcher.model
    return as_view(view, _CALLS, _Encoding(settings, cache, made_by))


@dataclass(frozen=True)
class _Encoding:
    """The calls of one CLIP and its clones."""

    settings: CompileSettings
    cache: GraphCache
    made_by: str | None

    def __deepcopy__(self, memo: dict) -> _Encoding:
        return self

    @contextmanager
    def call(self, clip: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        called: list[torch.nn.Module] = []
        models = [getattr(part, "transformer", None) for part in clip.cond_stage_model.modules()]
        models = [model for model in models if isinstance(model, torch.nn.Module)]
        with substituted({model: functools.partial(self._encode, model, called) for model in models}, Order.CACHED):
            yield
        if not called:
            why = Reason("generates_text") if name == "generate" else Reason("no_block_compilable")
            fallbacks.note(type(clip.cond_stage_model).__name__, why)

    def _encode(
        self, model: torch.nn.Module, called: list[torch.nn.Module], inner: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """A call of one encoder, its blocks compiled where it reads a prompt; only now are its weights in place."""
        called.append(model)
        name, why = type(model).__name__, None
        if kwargs.get("past_key_values") is not None:  # a call of another shape for each word, and each looked up
            why = Reason("generates_text")
        elif is_compiled(model):
            why = Reason("compiled_already")
        if why is not None:
            fallbacks.note(name, why)
            return inner(*args, **kwargs)
        with self.cache.lease() as lease:
            layers = block_layers(model, self.settings, self.cache, lease)
            kinds = count_kinds(layers)
            if not kinds:
                why = Reason("no_block_compilable")
                if self.settings.stop_on_trouble:
                    raise Trouble(f"{name} cannot run compiled: {why}")
                fallbacks.note(name, why)
            given = kwargs.get("embeds")
            if isinstance(given, torch.Tensor) and given.ndim == 3:
                lease.uses = (Use(name, (), given.shape[0], given.shape[1]),)
            own = layers[model]  # this call has already passed the place where it is now
            node_id = leading_node(self.made_by, "CLIP")
            with CompileProgress().during_call(kinds, node_id), substituted(layers, Order.COMPILED):
                return own(inner, *args, **kwargs)
