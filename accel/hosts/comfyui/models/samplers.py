"""What is known of a sampler: the noise level of each evaluation, for the most part without waiting for the device, and
what it does with predictions."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ....core.events import log
from ....core.host_copy import HostCopy
from ....step_cache.noise_levels import is_near
from ....step_cache.sampler_facts import Noise, Predict, SamplerFacts, measure

LEARNED = 4
"""Evaluations at the schedule's levels, one after the other, after which the sampler is taken to go on like that. All
of core's do (`test_deep_cache_samplers.py`); heunpp2 looks two steps ahead before it comes back."""


class NoiseLevels:
    """Reads the levels of one run.

    Reading one from the device waits until all that is queued there is done, and the device is idle meanwhile. Most
    samplers evaluate each step once, at the step's own level, which is known. So after the first `LEARNED` levels the
    others are taken from the schedule, and compared with what they were as soon as the device has passed them.

    follows_schedule: whether any may be taken from there.
    """

    def __init__(self, follows_schedule: bool):
        self._follows_schedule = follows_schedule
        self._count = 0
        self._unchecked: list[tuple[float, HostCopy]] = []

    def read(self, timestep: torch.Tensor, schedule: Sequence[float]) -> float:
        """The level of the next evaluation. timestep: as the sampler passes it. schedule: the run's levels."""
        place = self._count
        self._count += 1
        expected = schedule[place] if place + 1 < len(schedule) else None
        while self._unchecked and self._unchecked[0][1].has_come():
            known, come = self._unchecked.pop(0)
            if self._follows_schedule and not is_near(known, float(come.read())):
                log.warning("DeepCache: this sampler left the schedule on its way; its levels are read one by one.")
                self._follows_schedule = False
        if self._follows_schedule and expected is not None and place >= LEARNED:
            self._unchecked.append((expected, HostCopy(timestep.max())))
            return expected
        level = float(timestep.max())
        if timestep.dtype in (torch.float16, torch.bfloat16):  # of a sampler whose latent is
            nearest = min(schedule, key=lambda known: abs(known - level))
            level = nearest if abs(nearest - level) <= torch.finfo(timestep.dtype).eps * level else level
        self._follows_schedule = self._follows_schedule and expected is not None and is_near(expected, level)
        return level


def follows_schedule(sampler: Any, device: torch.device) -> bool:
    """Whether levels may be taken from the schedule: reading them would wait for the device, and the sampler is one of
    core's, none of which changes its ways in mid-run. A node pack's may bear the name of the one that it wraps."""
    function = getattr(sampler, "sampler_function", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    is_cores = module is not None and module.__name__.partition(".")[0] == "comfy"
    return device.type == "cuda" and is_cores and getattr(module, function.__name__, function) is function


def facts_of(sampler: Any, guider: Any, levels: Sequence[float], is_flow: bool) -> SamplerFacts:
    """What core's KSAMPLER does on a schedule, run without the model. guider: for what it asks of the model."""
    models: list[_Model] = []

    def sample(predict: Predict, noise: Noise, latent: torch.Tensor) -> torch.Tensor:
        models.append(_Model(guider, predict))
        # Copies of what may keep a state: how far a pack's sampler has come, a generator.
        function, options = copy.copy(sampler.sampler_function), dict(sampler.extra_options)
        options |= {name: one.clone_state() for name, one in options.items() if isinstance(one, torch.Generator)}
        if "noise_sampler" in inspect.signature(function).parameters:
            options["noise_sampler"] = lambda *_, **__: noise(latent)
        given = {"model_options": {"transformer_options": {}}, "seed": 0}
        return function(models[-1], latent, torch.tensor(levels), extra_args=given, disable=True, **options)

    facts = measure(levels, is_flow, sample)
    if any(model.is_asked_for_parts for model in models):
        return replace(facts, response=None)  # the parts' errors differ
    return facts


class _Model:
    """What core's samplers call, with predictions from elsewhere. They find the rest of the model as `inner_model`."""

    def __init__(self, guider: Any, predict: Predict):
        self.inner_model, self._predict = guider, predict
        self.is_asked_for_parts = False
        """Whether the sampler goes by the predictions with and without the prompt too (CFG++)."""

    def __call__(self, latent: torch.Tensor, sigma: torch.Tensor, model_options: Any = None, **_: Any) -> torch.Tensor:
        prediction = self._predict(latent, float(sigma.max()))
        for function in (model_options or {}).get("sampler_post_cfg_function", ()):
            self.is_asked_for_parts = True
            prediction = function(dict.fromkeys(("denoised", "cond_denoised", "uncond_denoised"), prediction))
        return prediction
