"""The steps of one image by its diffusers scheduler: timesteps, and the noise level at each."""

from __future__ import annotations

import math
from typing import Any

import torch

SMALLEST_ALPHA = 2**-24
"""Lower bound of alphas_cumprod, for schedules that start without any signal; as in diffusers' own samplers."""

ROUNDINGS = 1.5
"""How far a timestep may be from the scheduler's, in epsilons of its dtype at the largest timestep: some pipelines
round it to the latents' dtype, and once more when they divide it."""


def is_flow(scheduler: Any) -> bool:
    """Whether the scheduler's sigmas are shares of noise, 0 to 1, instead of its ratio to the image."""
    if getattr(getattr(scheduler, "config", None), "use_flow_sigmas", False):
        return True
    sigmas = getattr(scheduler, "sigmas", None)
    return sigmas is not None and not hasattr(scheduler, "alphas_cumprod") and bool((sigmas <= 1).all())


def noise_levels(scheduler: Any, timesteps: list[float]) -> list[float]:
    """The noise level, as sigma, at each of `timesteps`; the timestep itself where the scheduler has no sigmas. Log
    sigma is interpolated linearly between the timesteps of training, as samplers that choose such ones do. A flow, or a
    scheduler without a training schedule, has sigmas for its own timesteps only."""
    if is_flow(scheduler) or not hasattr(scheduler, "alphas_cumprod"):
        levels = getattr(scheduler, "sigmas", torch.tensor(timesteps)).tolist()[: len(timesteps)]
        is_inverted = getattr(getattr(scheduler, "config", None), "invert_sigmas", False)  # Mochi's are shares of image
        return [1 - level for level in levels] if is_inverted else levels
    config = getattr(scheduler, "config", None)
    if getattr(config, "timestep_type", None) == "continuous" and config.prediction_type == "v_prediction":
        return scheduler.sigmas.tolist()[: len(timesteps)]  # its timesteps are logarithms of them (EDM)
    alphas = scheduler.alphas_cumprod.detach().cpu().double().clamp(SMALLEST_ALPHA, 1 - SMALLEST_ALPHA)
    log_sigmas = ((1 - alphas) / alphas).log() / 2
    places = torch.tensor(timesteps, dtype=torch.float64).clamp(0, len(alphas) - 1)
    below = places.floor().long()
    above = (below + 1).clamp(max=len(alphas) - 1)
    return torch.lerp(log_sigmas[below], log_sigmas[above], places - below).exp().tolist()


class PipelineSchedule:
    """A scheduler's schedule until its next `set_timesteps`; an unknown kind raises what reading it raises."""

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler
        self.timesteps: torch.Tensor = scheduler.timesteps
        self.is_flow = is_flow(scheduler)
        self._times: list[float] = self.timesteps.tolist()
        levels = zip(self._times, noise_levels(scheduler, self._times), strict=True)
        self.levels: dict[float, float] = dict(levels)  # timestep → noise level, in the order of the steps
        trained = float(getattr(getattr(scheduler, "config", None), "num_train_timesteps", 1000))
        self._aliases = [
            ([scale * (trained - time if is_inverted else time) for time in self.levels], trained * scale)
            for is_inverted in (False, True)
            for scale in (1.0, 1 / trained)
        ]
        """What pipelines may pass to their model for the timesteps, each with its largest value: Flux and AuraFlow pass
        shares of noise, Lumina 2 and Z-Image shares of image."""

    def place_of(self, timestep: Any) -> int | None:
        """First index of `timestep` in the schedule; None where it is not in it.

        timestep: a number, or a tensor of equal numbers and zeros, as where some frames of a video are given; the
        scheduler's own or what pipelines make of it. Where it may be several, the scheduler's step count decides. That
        also excludes calls of another pipeline, which are at other timesteps than the one that is due.
        """
        given = torch.as_tensor(timestep)
        largest = given.max()
        is_one = ((given == largest) | (given == 0)).all()
        time, is_one = torch.stack([largest, is_one.to(given.dtype)]).tolist()  # waits for the device once
        if not is_one:
            return None
        found = [list(self.levels).index(time)] if time in self.levels else []
        due = self._place_due()
        if not found or due not in (found[0], None):
            epsilon = torch.finfo(given.dtype if given.is_floating_point() else torch.float64).eps
            for called, scale in self._aliases:
                far = [abs(known - time) for known in called]
                near = (place for place, distance in enumerate(far) if distance <= ROUNDINGS * epsilon * scale)
                found += sorted(near, key=far.__getitem__)
        if due in found:
            return due
        has_begun = getattr(self.scheduler, "step_index", None) is not None
        return None if has_begun or not found else found[0]

    def _place_due(self) -> int | None:
        """Index of the current step by the scheduler's own count; None for one that does not count."""
        if not hasattr(self.scheduler, "step_index"):
            return None
        begin, index = getattr(self.scheduler, "begin_index", None) or 0, self.scheduler.step_index
        index = begin if index is None else index
        return list(self.levels).index(self._times[index]) if 0 <= index < len(self._times) else None

    def level(self, place: int) -> float:
        return list(self.levels.values())[place]

    def run_from(self, place: int) -> tuple[float, ...]:
        """The noise levels of the steps of a run that starts at `place`, without those within a second-order sampler's
        step, then the one at which it ends."""
        to_come = set(list(self.levels)[place:])
        steps = dict.fromkeys(self._times[:: getattr(self.scheduler, "order", 1)])
        levels = [self.levels[time] for time in steps if time in to_come]
        most = 1.0 if self.is_flow else math.inf
        return (*levels, most if levels and levels[0] < levels[-1] else 0.0)

    def level_at(self, percent: float) -> float:
        """The noise level at a fraction of the training schedule, 0.0 the noisiest; for a flow, whose images may shift
        steps differently, of its steps."""
        if not 0.0 < percent < 1.0:
            return 0.0 if percent else math.inf
        if hasattr(self.scheduler, "alphas_cumprod") and not self.is_flow:
            return noise_levels(self.scheduler, [(1 - percent) * (len(self.scheduler.alphas_cumprod) - 1)])[0]
        return self.level(int(percent * len(self.levels)))
