"""The call of a pipeline's model with its blocks compiled."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ...core.compile_settings import CompileSettings
from ...core.fallbacks import fallbacks
from ...core.reasons import Reason
from ...fingerprint.survey import KeptSurveys
from ...modules.blocks import is_compiled_itself
from ...modules.substitution import Order, substitute
from .components import asks_for_attentions, disable_idle_hooks, load
from .runs import new_run, open_run

_SLOT = "_compiled_call_impl"
"""The attribute that torch calls in place of a module if it is set (`Module.compile` sets it). It is outside of the
module's hooks and of its forward, which offloading replaces, and it is not copied with the module."""


class ComponentCall:
    """Fills the slot of one module, which several pipelines may share: it refers to none. owner: who placed it."""

    __slots__ = ("__weakref__", "_model", "_settings", "_surveys", "owner")

    def __init__(self, model: torch.nn.Module, settings: CompileSettings, owner: object):
        self._model, self._settings, self.owner = weakref.ref(model), settings, owner
        self._surveys = KeptSurveys()

    def __bool__(self) -> bool:
        """False: code that checks the slot (peft's does) asks whether the model is compiled as a whole."""
        return False

    # The caller may be compiled; this must not become part of its graph.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        load(model)
        args = tuple(map(_make_contiguous, args))
        kwargs = {name: _make_contiguous(value) for name, value in _split_prompts(kwargs).items()}
        if asks_for_attentions(model, kwargs):  # of parts of its blocks, which a compiled block does not hand out
            fallbacks.note(type(model).__name__, Reason("attentions_asked"))
            return model._call_impl(*args, **kwargs)
        run = open_run()
        with nullcontext(run) if run is not None else new_run() as run, disable_idle_hooks(model):
            with substitute(run.layers(model, self._settings, self._surveys), Order.COMPILED, this_thread_only=True):
                return model._call_impl(*args, **kwargs)


def call_of(model: torch.nn.Module) -> ComponentCall | None:
    """The model's `ComponentCall`, if it has one."""
    found = model.__dict__.get(_SLOT)
    return found if isinstance(found, ComponentCall) else None


def place(model: torch.nn.Module, settings: CompileSettings, owner: object) -> bool:
    """Call the model through a `ComponentCall` from now on; False if somebody else compiled it as a whole."""
    if is_compiled_itself(model):
        return False
    model.__dict__[_SLOT] = ComponentCall(model, settings, owner)
    return True


def take_away(model: torch.nn.Module, owner: object | None = None) -> None:
    """Undo `place`. owner: undo it only if this one placed it; None for any."""
    found = call_of(model)
    if found is not None and (owner is None or found.owner is owner):
        del model.__dict__[_SLOT]


def place_again(calls: Mapping[torch.nn.Module, ComponentCall]) -> None:
    """Give models back the calls that they had, where nothing has come in their place."""
    for model, call in calls.items():
        if _SLOT not in model.__dict__:
            model.__dict__[_SLOT] = call


def _split_prompts(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A transformer's named arguments with a prompt in a row for each image. Flux's pipeline gives one row for several
    images where it was given features: its first block would need a graph of its own."""
    images, prompt = kwargs.get("hidden_states"), kwargs.get("encoder_hidden_states")
    if not (isinstance(images, torch.Tensor) and isinstance(prompt, torch.Tensor) and images.ndim == prompt.ndim == 3):
        return kwargs
    if not prompt.shape[0] == 1 < images.shape[0]:
        return kwargs
    return {**kwargs, "encoder_hidden_states": prompt.expand(images.shape[0], -1, -1).contiguous()}


def _make_contiguous(value: Any) -> Any:
    """An image or latent ([B, C, H, W], [B, C, F, H, W]) contiguous; any other argument as it is.

    A pipeline produces other strides from a PIL image than from a tensor, and these pass through the whole model:
    each would need its own graphs. A model whose weights are channels-last converts its inputs anyway. Lists are not
    copied: some models write to the ones they are given.
    """
    return value.contiguous() if isinstance(value, torch.Tensor) and value.ndim >= 4 else value
