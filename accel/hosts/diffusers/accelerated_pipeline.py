"""One pipeline while it is accelerated: which of its models are, what surrounds their calls, and the way back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...cache.graph_cache import GraphCache
from ...core.compile_settings import CompileSettings
from ...core.fallbacks import fallbacks
from ...step_cache.config import DeepCacheSettings
from . import component_call
from .components import chosen
from .deep_cache import deep_cache
from .denoising_loop import around_loops
from .runs import new_run

_NAME = "_accel"
"""Under which a pipeline has this; it is no component of it and no setting."""


class AcceleratedPipeline:
    """begin, then end; both as often as one likes. Held by the pipeline itself, so that it goes with it."""

    def __init__(
        self,
        pipe: Any,
        ignores: tuple[str, ...],
        settings: CompileSettings,
        deep_cache_settings: DeepCacheSettings | None,
        cache: GraphCache,
    ):
        self._pipe = weakref.ref(pipe)
        self._ignores = ignores
        self._settings = settings
        self._deep_cache = deep_cache_settings
        self._cache = cache
        self._models: dict[str, weakref.ref[torch.nn.Module]] = {}
        self._undo = ExitStack()

    def __deepcopy__(self, memo: dict) -> None:
        """None: a copy of a pipeline is not accelerated."""
        return None

    def begin(self) -> None:
        """Raises ValueError where DeepCache's depth is beyond the model; the pipeline is as before then."""
        pipe = self._pipe()
        with ExitStack() as undo:
            if self._deep_cache is not None:
                undo.enter_context(deep_cache(pipe, self._deep_cache))
            undo.enter_context(around_loops(pipe, self._loop))
            for name, model in chosen(pipe, self._ignores).items():
                self._place(name, model)
            vars(pipe)[_NAME] = self
            self._undo = undo.pop_all()

    def end(self) -> None:
        pipe = self._pipe()
        if vars(pipe).get(_NAME) is self:
            del vars(pipe)[_NAME]
        try:
            self._undo.close()
        finally:
            for name in list(self._models):
                self._leave(name)

    @contextmanager
    def _loop(self) -> Iterator[None]:
        """For one denoising loop, which is one run."""
        self._follow()
        with new_run(self._cache):
            yield

    def _follow(self) -> None:
        """Models that somebody has put in the place of others are accelerated in their stead."""
        now = chosen(self._pipe(), self._ignores)
        known = {name: reference() for name, reference in self._models.items()}
        for name in [name for name, model in known.items() if now.get(name) is not model]:
            self._leave(name)
        for name in [name for name, model in now.items() if known.get(name) is not model]:
            self._place(name, now[name])

    def _place(self, name: str, model: torch.nn.Module) -> None:
        self._models[name] = weakref.ref(model)
        if not component_call.place(model, self._settings, self._cache, self):
            fallbacks.note(type(model).__name__, "it is compiled as a whole by somebody else")

    def _leave(self, name: str) -> None:
        model = self._models.pop(name)()
        if model is not None:
            component_call.take_away(model, self)


def of(pipe: Any) -> AcceleratedPipeline | None:
    """The pipeline's own, where it is accelerated."""
    found = vars(pipe).get(_NAME)
    return found if isinstance(found, AcceleratedPipeline) and found._pipe() is pipe else None
