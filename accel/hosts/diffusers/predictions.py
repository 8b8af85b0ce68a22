"""What a pipeline's scheduler is given at each step, and what it does with it."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from ...step_cache.noise_levels import angle as angle_of
from ...step_cache.sampler_facts import Noise, Predict, SamplerFacts, measure
from .replaced_method import replace_method
from .schedule import PipelineSchedule, is_flow


def noisy(scheduler: Any, timestep: Any, sample: torch.Tensor, angle: float) -> torch.Tensor:
    """The noisy latent [B, ...] in float32, with the image at its own size, or its share with a flow, at a noise level
    (`noise_levels.angle`). timestep, sample: as for `scheduler.step`."""
    if _read_prediction_type(scheduler) == "flow_prediction":
        return sample.float()
    # All of diffusers' schedulers scale what the model gets to unit variance, whatever they keep themselves.
    return scheduler.scale_model_input(sample, timestep).float() / math.cos(angle)


def compute_denoised(scheduler: Any, output: torch.Tensor, latent: torch.Tensor, angle: float) -> torch.Tensor:
    """The denoised latent in float32 that the model's `output` for this noisy one stands for."""
    of_latent, of_output = shares(scheduler, angle)
    return of_latent * latent + of_output * output.float()


def output_of(scheduler: Any, denoised: torch.Tensor, latent: torch.Tensor, angle: float) -> torch.Tensor:
    """What the model would return for this noisy latent to stand for the denoised one."""
    of_latent, of_output = shares(scheduler, angle)
    return (denoised - of_latent * latent) / of_output


def shares(scheduler: Any, angle: float) -> tuple[float, float]:
    """By how much the denoised latent changes with the noisy one, and with the model's output. Raises ValueError for a
    prediction of an unknown kind."""
    cosine, sine, kind = math.cos(angle), math.sin(angle), _read_prediction_type(scheduler)
    known = {
        # Cosmos' flow is at noise levels that are ratios to the image.
        "flow_prediction": (1.0, -sine / (sine + cosine if is_flow(scheduler) else cosine)),
        "epsilon": (1.0, -sine / cosine),
        "v_prediction": (cosine**2, -sine),
        "sample": (0.0, 1.0),
    }
    if kind not in known:
        raise ValueError(f"its scheduler predicts {kind}")
    return known[kind]


def _read_prediction_type(scheduler: Any) -> str:
    return getattr(scheduler.config, "prediction_type", "flow_prediction")


def facts_of(schedule: PipelineSchedule, place: int) -> SamplerFacts:
    """What a scheduler does from the step at `place` on, by running a copy of it on the CPU, without the model."""
    original, levels = schedule.scheduler, schedule.run_from(place)
    timesteps = schedule.timesteps[place:].cpu()
    if getattr(original, "step_index", None) not in (None, place):
        return SamplerFacts(levels, schedule.is_flow, adds_noise=True)  # it went on or back
    level_of = {float(time): level for time, level in schedule.levels.items()}

    def sample(predict: Predict, noise: Noise, latent: torch.Tensor) -> torch.Tensor:
        scheduler = _copy_to_cpu(original)  # with noise of its own, which is seen to be that
        for timestep in timesteps:
            level = level_of[float(timestep)]
            angle = angle_of(level, schedule.is_flow)
            seen = noisy(scheduler, timestep, latent, angle)
            output = output_of(scheduler, predict(seen, level), seen, angle)
            latent = scheduler.step(output, timestep, latent, return_dict=False)[0]
        return latent

    facts = measure(levels, schedule.is_flow, sample)
    # Configs made from another scheduler's have fields that the class ignores.
    own, config = inspect.signature(type(original).__init__).parameters, getattr(original, "config", None)
    is_clipped = any(getattr(config, name, False) for name in ("clip_sample", "thresholding") if name in own)
    return replace(facts, response=None) if is_clipped else facts


def _copy_to_cpu(scheduler: Any) -> Any:
    """A copy, without what contexts have made of its step."""
    shallow = copy.copy(scheduler)
    vars(shallow).pop("step", None)
    tensors = {name: one.cpu() for name, one in vars(shallow).items() if isinstance(one, torch.Tensor)}
    vars(shallow).update(tensors)
    return copy.deepcopy(shallow)


def wrap_steps(
    scheduler: Any, begin: Callable[[dict[str, Any]], torch.Tensor | None], end: Callable[[Any], None]
) -> AbstractContextManager[None]:
    """Within what it returns, `begin` gets the arguments of each `scheduler.step` before that runs, and returns what it
    is to be given in place of the model's output, if anything; `end` gets what it returns."""
    names = tuple(inspect.signature(scheduler.step).parameters)

    def step(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        output = begin(given)
        if output is not None:
            args, kwargs = (), {**given, "model_output": output}
        result = own(*args, **kwargs)
        end(result)
        return result

    return replace_method(scheduler, "step", step)
