"""The steps of one image, as a diffusers scheduler tells them: timesteps, and the noise at each."""

from __future__ import annotations

import math
from typing import Any

import torch

SMALLEST_ALPHA = 2**-24
"""Schedules that start without any signal count as this noisy there, as in diffusers' own samplers."""


def noise_levels(scheduler: Any, timesteps: list[float]) -> list[float]:
    """The noise level, as sigma, at each of `timesteps`; where the scheduler does not say, the timestep.

    Between the timesteps of training log sigma is linear, as for the samplers that choose such timesteps.
    A scheduler without a training schedule has a sigma for each of its own timesteps, and only for them.
    """
    if not hasattr(scheduler, "alphas_cumprod"):
        return getattr(scheduler, "sigmas", torch.tensor(timesteps)).tolist()[: len(timesteps)]
    alphas = scheduler.alphas_cumprod.detach().cpu().double().clamp(SMALLEST_ALPHA, 1 - SMALLEST_ALPHA)
    log_sigmas = ((1 - alphas) / alphas).log() / 2
    places = torch.tensor(timesteps, dtype=torch.float64).clamp(0, len(alphas) - 1)
    below = places.floor().long()
    above = (below + 1).clamp(max=len(alphas) - 1)
    return torch.lerp(log_sigmas[below], log_sigmas[above], places - below).exp().tolist()


class PipelineSchedule:
    """The schedule that a scheduler has at present: after the next `set_timesteps` it is another one."""

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler
        self.timesteps: torch.Tensor = scheduler.timesteps
        times = self.timesteps.tolist()
        self.levels: dict[float, float] = dict(zip(times, noise_levels(scheduler, times), strict=True))
        """Noise level of each timestep, in the order in which they come."""

    def is_of(self, scheduler: Any) -> bool:
        """Whether the scheduler is still in this schedule; for every image it makes new timesteps."""
        return scheduler is self.scheduler and scheduler.timesteps is self.timesteps

    def place_of(self, timestep: Any) -> int | None:
        """Where in the schedule `timestep` (a number, or a tensor of equal ones) is first; None if nowhere."""
        time, *others = set(torch.as_tensor(timestep).flatten().tolist())
        return None if others or time not in self.levels else list(self.levels).index(time)

    def level(self, place: int) -> float:
        return list(self.levels.values())[place]

    def run_from(self, place: int) -> tuple[float, ...]:
        """The noise levels of the steps of a run that starts at `place`, and the one at which it ends.

        Second-order samplers list the timesteps within a step too; they are no steps.
        """
        to_come = set(list(self.levels)[place:])
        steps = dict.fromkeys(self.timesteps[:: getattr(self.scheduler, "order", 1)].tolist())
        levels = [self.levels[time] for time in steps if time in to_come]
        return (*levels, math.inf if levels and levels[0] < levels[-1] else 0.0)

    def level_at(self, percent: float) -> float:
        """The noise level at a fraction of the schedule that the model was trained on; 0.0 is the noisiest."""
        if not 0.0 < percent < 1.0:
            return 0.0 if percent else math.inf
        if hasattr(self.scheduler, "alphas_cumprod"):
            return noise_levels(self.scheduler, [(1 - percent) * (len(self.scheduler.alphas_cumprod) - 1)])[0]
        return self.level(int(percent * len(self.levels)))
