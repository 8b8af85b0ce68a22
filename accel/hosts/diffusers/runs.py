"""Runs of a pipeline: which compiled layers the calls of its models use.

A run is one denoising loop; a call outside of any loop (of a VAE, a text encoder, or by the user's own code) is a run
by itself. Graphs that a run uses stay in the cache until its end.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...cache.entry import Lease
from ...cache.graph_cache import shared
from ...core.compile_settings import CompileSettings
from ...core.fallbacks import fallbacks
from ...core.reasons import Reason
from ...dispatch.compiled_layers import Host, make_compiled_layers, survey_model
from ...fingerprint.survey import KeptSurveys, Region, Survey
from ...modules.blocks import is_compiled
from ...modules.substitution import Layer
from .components import find_part_hooks
from .peft import PeftLayers

_ATTENTION_KWARGS = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")


def simplifier(region: Region) -> Callable[[dict], dict] | None:
    """A function that replaces None by an empty dict in a diffusers block's attention kwargs; None for other blocks.
    Pipelines pass an empty dict where these had a LoRA scale. Blocks treat both alike, so one graph serves both."""
    cls = type(region.block)
    parameters = inspect.signature(cls.forward).parameters
    name = next((name for name in _ATTENTION_KWARGS if name in parameters), None)
    if name is None or cls.__module__.partition(".")[0] != "diffusers":
        return None

    def simplify(options: dict) -> dict:
        return {**options, name: {}} if options.get(name, options) is None else options

    return simplify


HOST = Host(simplifier=simplifier, wraps=PeftLayers())

_MOST_LOOKS = 8  # how often one run inspects a model that changes between its calls; after that, the model runs eagerly
Layers = dict[torch.nn.Module, Layer]


class Run:
    """The compiled layers of the models called in one run of a thread; made at their first call, dropped at its end."""

    def __init__(self, lease: Lease):
        self._lease = lease
        self._placed: dict[torch.nn.Module, tuple[Layers, Survey | None]] = {}
        self._looks: Counter[torch.nn.Module] = Counter()

    def layers(self, model: torch.nn.Module, settings: CompileSettings, surveys: KeptSurveys) -> Layers:
        """The layers for a call of the model now; made again if its modules or how weights are stored changed since its
        last call (`CurrentCode` sees to code and settings). surveys: of the model, from all runs."""
        layers, found = self._placed.get(model, (None, None))
        if layers is not None and (found is None or found.layout.changed_part(model) is None):
            return layers
        layers, found, self._looks[model] = {}, None, self._looks[model] + 1
        reason = Reason("compiled_already") if is_compiled(model) else find_part_hooks(model)
        if self._looks[model] > _MOST_LOOKS:
            reason = Reason("settings_change")
        if reason is not None:
            fallbacks.note(type(model).__name__, reason)
        else:
            survey = survey_model(model, settings, HOST, surveys)
            if survey.regions:
                found = survey
                layers = make_compiled_layers(model, found, settings, HOST, shared, self._lease, surveys=surveys)
        self._placed[model] = layers, found
        return layers


_open = threading.local()  # run: that this thread is in


def open_run() -> Run | None:
    """The run that the thread is in; None outside of any."""
    return getattr(_open, "run", None)


@contextmanager
def new_run() -> Iterator[Run]:
    """Make every model call of this thread inside the context part of one run."""
    before = open_run()
    with shared.lease() as lease:
        _open.run = Run(lease)
        try:
            yield _open.run
        finally:
            _open.run = before
