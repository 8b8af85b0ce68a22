"""The steps of one image, as a diffusers scheduler tells them: timesteps, and the noise at each."""

from __future__ import annotations

import math
from typing import Any

import torch

SMALLEST_ALPHA = 2**-24
"""Schedules that start without any signal count as this noisy there, as in diffusers' own samplers."""

ROUNDINGS = 1.5
"""How far a timestep may be from the scheduler's, in epsilons of its type at the largest timestep: some pipelines
round it to the latents' type, and then once more when they divide it."""


def is_flow(scheduler: Any) -> bool:
    """Whether the scheduler's sigmas are shares of noise, 0 to 1, and not its ratio to the picture."""
    if getattr(getattr(scheduler, "config", None), "use_flow_sigmas", False):
        return True
    sigmas = getattr(scheduler, "sigmas", None)
    return sigmas is not None and not hasattr(scheduler, "alphas_cumprod") and bool((sigmas <= 1).all())


def noise_levels(scheduler: Any, timesteps: list[float]) -> list[float]:
    """The noise level, as sigma, at each of `timesteps`; where the scheduler does not say, the timestep.

    Between the timesteps of training log sigma is linear, as for the samplers that choose such timesteps.
    A flow, or a scheduler without a training schedule, has a sigma for each of its own timesteps, and only for them.
    """
    if is_flow(scheduler) or not hasattr(scheduler, "alphas_cumprod"):
        levels = getattr(scheduler, "sigmas", torch.tensor(timesteps)).tolist()[: len(timesteps)]
        is_turned = getattr(getattr(scheduler, "config", None), "invert_sigmas", False)  # Mochi's are shares of picture
        return [1 - level for level in levels] if is_turned else levels
    alphas = scheduler.alphas_cumprod.detach().cpu().double().clamp(SMALLEST_ALPHA, 1 - SMALLEST_ALPHA)
    log_sigmas = ((1 - alphas) / alphas).log() / 2
    places = torch.tensor(timesteps, dtype=torch.float64).clamp(0, len(alphas) - 1)
    below = places.floor().long()
    above = (below + 1).clamp(max=len(alphas) - 1)
    return torch.lerp(log_sigmas[below], log_sigmas[above], places - below).exp().tolist()


class PipelineSchedule:
    """The schedule that a scheduler has at present: after the next `set_timesteps` it is another one.

    Raises whatever the scheduler makes of being asked, when it is of a kind that is not understood.
    """

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler
        self.timesteps: torch.Tensor = scheduler.timesteps
        self.is_flow = is_flow(scheduler)
        self._times: list[float] = self.timesteps.tolist()
        levels = zip(self._times, noise_levels(scheduler, self._times), strict=True)
        self.levels: dict[float, float] = dict(levels)
        """Noise level of each timestep, in the order in which they come."""
        trained = float(getattr(getattr(scheduler, "config", None), "num_train_timesteps", 1000))
        self._told = [
            ([scale * (trained - time if is_turned else time) for time in self.levels], trained * scale)
            for is_turned in (False, True)
            for scale in (1.0, 1 / trained)
        ]
        """What pipelines call the timesteps when they call their model, and how large that is at most: Flux and
        AuraFlow pass shares of noise, Lumina 2 and Z-Image shares of picture."""

    def is_of(self, scheduler: Any) -> bool:
        """Whether the scheduler is still in this schedule; for every image it makes new timesteps."""
        return scheduler is self.scheduler and scheduler.timesteps is self.timesteps

    def place_of(self, timestep: Any) -> int | None:
        """Where in the schedule `timestep` is first; None if nowhere.

        timestep: a number, or a tensor of equal ones and zeros, as where some frames of a video are given. It is the
        scheduler's own or what pipelines make of it; where it might be several the scheduler's count decides. By that
        another pipeline's calls are known too: they are at other timesteps than the one that is due.
        """
        told = torch.as_tensor(timestep)
        largest = told.max()
        is_one = ((told == largest) | (told == 0)).all()
        time, is_one = torch.stack([largest, is_one.to(told.dtype)]).tolist()  # waits for the device once
        if not is_one:
            return None
        found = [list(self.levels).index(time)] if time in self.levels else []
        due = self._place_due()
        if not found or due not in (found[0], None):
            epsilon = torch.finfo(told.dtype if told.is_floating_point() else torch.float64).eps
            for called, scale in self._told:
                far = [abs(known - time) for known in called]
                near = (place for place, distance in enumerate(far) if distance <= ROUNDINGS * epsilon * scale)
                found += sorted(near, key=far.__getitem__)
        if due in found:
            return due
        return None if self._has_counted or not found else found[0]

    @property
    def _has_counted(self) -> bool:
        """Whether the scheduler counts its steps, and this image's have begun."""
        return getattr(self.scheduler, "step_index", None) is not None

    def _place_due(self) -> int | None:
        """Where the scheduler is by its own count; None for one that does not count."""
        if not hasattr(self.scheduler, "step_index"):
            return None
        index = self.scheduler.step_index if self._has_counted else getattr(self.scheduler, "begin_index", None) or 0
        return list(self.levels).index(self._times[index]) if 0 <= index < len(self._times) else None

    def level(self, place: int) -> float:
        return list(self.levels.values())[place]

    def run_from(self, place: int) -> tuple[float, ...]:
        """The noise levels of the steps of a run that starts at `place`, and the one at which it ends.

        Second-order samplers list the timesteps within a step too; they are no steps.
        """
        to_come = set(list(self.levels)[place:])
        steps = dict.fromkeys(self._times[:: getattr(self.scheduler, "order", 1)])
        levels = [self.levels[time] for time in steps if time in to_come]
        most = 1.0 if self.is_flow else math.inf
        return (*levels, most if levels and levels[0] < levels[-1] else 0.0)

    def level_at(self, percent: float) -> float:
        """The noise level at a fraction of the schedule that the model was trained on; 0.0 is the noisiest.

        Of a flow it is the fraction of its steps: how far they are shifted is decided for each image.
        """
        if not 0.0 < percent < 1.0:
            return 0.0 if percent else math.inf
        if hasattr(self.scheduler, "alphas_cumprod") and not self.is_flow:
            return noise_levels(self.scheduler, [(1 - percent) * (len(self.scheduler.alphas_cumprod) - 1)])[0]
        return self.level(int(percent * len(self.levels)))
