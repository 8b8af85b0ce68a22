"""What torch calls instead of a pipeline's model: the model itself, while its blocks have their stand-ins."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...cache.graph_cache import GraphCache
from ...core.compile_settings import CompileSettings
from ...modules.substitution import Order, substituted
from . import offload
from .call_layout import contiguous
from .runs import Run, new_run, open_run

_SLOT = "_compiled_call_impl"
"""Where torch looks for what to call in a module's place (`Module.compile` puts it there). It is outside of the
module's hooks and of its forward, which offloading replaces, and does not come along when a module is copied."""


class ComponentCall:
    """In the slot of one module. It knows no pipeline: every pipeline that has the module calls it.

    owner: who put it there.
    """

    __slots__ = ("__weakref__", "_cache", "_model", "_settings", "owner")

    def __init__(self, model: torch.nn.Module, settings: CompileSettings, cache: GraphCache, owner: object):
        self._model = weakref.ref(model)
        self._settings = settings
        self._cache = cache
        self.owner = owner

    def __bool__(self) -> bool:
        """False: those who ask (peft does) want to know of a model that is compiled as a whole."""
        return False

    # Somebody may compile what calls the model: our own work is not for a graph.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        offload.load(model)
        args, kwargs = contiguous(args, kwargs)
        run = open_run(self._cache)
        if run is not None:
            return self._call(run, model, args, kwargs)
        with new_run(self._cache) as run:
            return self._call(run, model, args, kwargs)

    def _call(self, run: Run, model: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
        with substituted(run.layers(model, self._settings), Order.COMPILED, this_thread_only=True):
            return model._call_impl(*args, **kwargs)


def call_of(model: torch.nn.Module) -> ComponentCall | None:
    """Ours, where the model has one."""
    found = model.__dict__.get(_SLOT)
    return found if isinstance(found, ComponentCall) else None


def place(model: torch.nn.Module, settings: CompileSettings, cache: GraphCache, owner: object) -> bool:
    """Have the model called through a `ComponentCall`; False where it is compiled as a whole by somebody else."""
    if model.__dict__.get(_SLOT) is not None and call_of(model) is None or "_orig_mod" in model._modules:
        return False
    model.__dict__[_SLOT] = ComponentCall(model, settings, cache, owner)
    return True


def take_away(model: torch.nn.Module, owner: object | None = None) -> None:
    """Have the model called as it was before `place`. owner: nobody else's is taken away; None for anybody's."""
    found = call_of(model)
    if found is not None and (owner is None or found.owner is owner):
        del model.__dict__[_SLOT]
