"""What a sampler does with predictions, measured by running it on impulses: no sampler is known by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from ..core.events import log
from .noise_levels import angle, is_in_order, is_near, step_of

MEMORY = 4
"""The most predictions that a sampler's step depends on beside the latent."""

MOST_EVALUATIONS = 4
"""Of one step."""

_INEXACT = 1e-4


@dataclass(frozen=True)
class Response:
    """How the predictions that a sampler asks for reach its later latents, beside the noise that it adds.

    levels: noise levels of its evaluations. effects: [evaluations + 1, evaluations], by how much the latent of each
    evaluation, and the final one, moves when the prediction of an earlier one does. folds: for each evaluation, what
    stands for the prediction `MEMORY` before it from then on, in terms of those since.
    """

    levels: tuple[float, ...]
    effects: list[list[float]]
    folds: list[list[float]]


@dataclass(frozen=True)
class SamplerFacts:
    """A sampler on one schedule.

    levels: noise levels of its steps, and the one at which it ends. is_flow: whether they are shares of noise, 0 to 1,
    instead of its ratio to the image. adds_noise: whether a step adds noise, or what it does is not known. gains: by
    how much an error in the predictions of each step moves the image; empty where that could not be measured. response:
    None where what it does is not linear.
    """

    levels: tuple[float, ...]
    is_flow: bool
    adds_noise: bool
    gains: tuple[float, ...] = ()
    response: Response | None = None

    @cached_property
    def angles(self) -> tuple[float, ...]:
        """The noise levels in radians."""
        return tuple(min(angle(level, self.is_flow), math.pi / 2) for level in self.levels)

    @cached_property
    def noise_shares(self) -> tuple[float, ...]:
        """The shares of noise in the latent at these levels, from 0 to 1."""
        return tuple(math.sin(at) / (math.sin(at) + math.cos(at)) for at in self.angles)

    @property
    def steps(self) -> int:
        return max(len(self.levels) - 1, 0)

    def gain(self, step: int) -> float:
        """One of `gains`; where these are not known, Euler's method's, enlarged as much as any sampler's is."""
        return self.gains[step] if self.gains else MOST_ENLARGED * (1 - _compute_kept_noise(self.angles, step))


MOST_ENLARGED = 1.6
"""The gain over that of Euler's method: most multistep samplers are at 1.5 or below, a few at 1.6 to 1.9."""


def _compute_kept_noise(angles: Sequence[float], step: int) -> float:
    """The share of the noise in the latent that is left after the step."""
    start, end = (math.tan(at) for at in angles[step : step + 2])
    return min(max(end / start, 0.0), 1.0) if start > 0 else 0.0


Predict = Callable[[torch.Tensor, float], torch.Tensor]
"""Gives a prediction of the denoised latent for a latent [B, ...] at a noise level."""

Noise = Callable[[torch.Tensor], torch.Tensor]
"""Gives noise like a latent."""

Sample = Callable[[Predict, Noise, torch.Tensor], torch.Tensor]
"""Runs a sampler with these predictions and this noise, from a latent [B, 1, 1, 1] to the final one."""


def measure(levels: Sequence[float], is_flow: bool, sample: Sample) -> SamplerFacts:
    """What a sampler does on a schedule, found by running it once without the model or random numbers. One that needs
    more of the model than its predictions is taken to add noise."""
    levels = tuple(levels)
    try:
        with torch.random.fork_rng(devices=[]):
            return _measure(levels, is_flow, sample)
    except Exception as error:
        log.debug("DeepCache: what a sampler does could not be measured: %s", error)
        return SamplerFacts(levels, is_flow, adds_noise=True)


def _measure(levels: tuple[float, ...], is_flow: bool, sample: Sample) -> SamplerFacts:
    unknown = SamplerFacts(levels, is_flow, adds_noise=True)
    count = unknown.steps
    if not count or not is_in_order(levels):
        return unknown
    most = MOST_EVALUATIONS * count
    anything = torch.rand(most, generator=torch.Generator().manual_seed(0))
    asked: list[float] = []
    latents: list[torch.Tensor] = []

    # Row 0 has predictions that are anything, row 1 the same and noise of another size, row 2 no noise at all. The
    # others have an impulse in one prediction each.
    def predict(latent: torch.Tensor, level: float) -> torch.Tensor:
        if len(asked) == most:
            raise RuntimeError(f"it evaluates each step more than {MOST_EVALUATIONS} times")
        prediction = torch.full_like(latent, float(anything[len(asked)]))
        prediction[3 + len(asked)] += 1.0
        asked.append(level)
        latents.append(latent.detach().reshape(-1).double().clone())
        return prediction

    def noise(latent: torch.Tensor) -> torch.Tensor:
        made = torch.ones_like(latent)
        made[1], made[2] = 2.0, 0.0
        return made

    final = sample(predict, noise, torch.zeros(most + 3, 1, 1, 1)).reshape(-1).double()
    steps = [step_of(level, levels) for level in asked]
    # The last one there: Heun's method goes to a step's level and comes back.
    begun = {step: at for at, step in enumerate(steps) if is_near(levels[step], asked[at])}
    if list(begun) != list(range(count)):
        return unknown
    moved = torch.stack([*latents, final])  # [evaluations + 1, rows]
    adds_noise = not torch.allclose(moved[:, 0], moved[:, 1], atol=1e-6)
    if adds_noise and not torch.allclose(moved[:, 1] - moved[:, 2], 2 * (moved[:, 0] - moved[:, 2]), atol=1e-4):
        return unknown  # noise of its own, which is another in every row
    effects = moved[:, 3 : 3 + len(asked)] - moved[:, :1]
    of_step = torch.nn.functional.one_hot(torch.tensor(steps), count).double()
    gains = _gains(levels, unknown.angles, is_flow, effects[[*begun.values(), -1]] @ of_step)
    response = _response(levels, tuple(asked), effects, moved[:, 2], anything.double())
    return SamplerFacts(levels, is_flow, adds_noise, tuple(gains), response)


def _gains(levels: tuple[float, ...], angles: tuple[float, ...], is_flow: bool, effects: torch.Tensor) -> list[float]:
    """What the predictions of each step add to the image, in all, beyond what the latent carries on by itself. effects:
    [steps + 1, steps]. The latent is scaled so that the image in it has its own size."""
    scale = [max(1 - level, 1e-3) if is_flow else 1.0 for level in levels]
    image = effects / torch.tensor(scale, dtype=effects.dtype)[:, None]
    kept = torch.tensor([_compute_kept_noise(angles, step) for step in range(len(levels) - 1)], dtype=effects.dtype)
    added = image[1:] - kept[:, None] * image[:-1]
    # What a step adds, multistep samplers take back in part in the next: neighbours' errors cancel, a single one
    # stands.
    return torch.maximum(added.sum(0).abs(), added.abs().amax(0)).tolist()


def _response(
    levels: Sequence[float], asked: tuple[float, ...], effects: torch.Tensor, moved: torch.Tensor, given: torch.Tensor
) -> Response | None:
    """The response, where the sampler is linear: `moved` [evaluations + 1] are its latents by the predictions
    `given`."""
    is_falling = all(one > other for one, other in pairwise([*levels[:-1], 0.0]))
    if not is_falling or not torch.allclose(moved, effects @ given[: len(asked)], rtol=_INEXACT, atol=_INEXACT):
        return None
    folds = []
    for evaluation in range(len(asked)):
        first = evaluation - MEMORY
        if first < 0:
            folds.append([])
            continue
        later = effects[evaluation + 1 :]
        oldest, since = later[:, first : first + 1], later[:, first + 1 : evaluation + 1]
        fold = torch.linalg.lstsq(since, oldest, rcond=1e-5, driver="gelsd").solution
        if (since @ fold - oldest).norm() > 10 * _INEXACT * (oldest.norm() + 1e-9):
            return None
        folds.append(fold.flatten().tolist())
    return Response(asked, effects.tolist(), folds)
