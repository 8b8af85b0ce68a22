"""Runs of the step cache whose skipped steps a test knows beforehand."""

import math
from dataclasses import dataclass

from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.noise_levels import angle
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.sampler_facts import SamplerFacts

SCHEDULE = (14.6, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0)


class Fixed:
    """A plan: full every `interval` steps, or but for `steps`, whatever the run shows. The run itself has its first two
    in full."""

    def __init__(self, interval, steps):
        self.interval, self.steps = interval, steps
        self.told = []
        """The steps of which errors were told at each full step."""

    def begin(self, facts):
        self.full = None

    def skips(self, step):
        return step in self.steps if self.steps else self.full is not None and 0 < step - self.full < self.interval

    def note_full(self, step):
        self.full = step

    def note_errors(self, errors):
        self.told.append(sorted(errors))


@dataclass(frozen=True)
class FixedSettings(DeepCacheSettings):
    """Settings with that plan."""

    interval: int = 3
    steps: tuple[int, ...] = ()

    @property
    def is_off(self):
        return self.interval == 1 or super().is_off

    def plan(self):
        return Fixed(self.interval, self.steps)


def every(interval=3, **settings):
    """Full every `interval` steps; 1: off."""
    return FixedSettings(interval=interval, **settings)


def skipping(*steps):
    """Full but for these steps."""
    return FixedSettings(steps=steps)


def letters(steps, interval=3):
    """What a run of so many steps with `every(interval)` takes."""
    return ("F" + ("F" + "S" * (interval - 1)) * steps)[:steps]


def run_of(settings=None, levels=SCHEDULE, window=(math.inf, 0.0), adds_noise=False, is_flow=False, **more):
    """A run on these noise levels, of a sampler whose response is not known."""
    return DeepCacheRun(settings or every(), SamplerFacts(tuple(levels), is_flow, adds_noise), window, **more)


def euler(run, predict, latent, levels=SCHEDULE, scale=lambda step: None):
    """The steps that called the model `predict`, from a latent and a noise level, and the final latent."""
    calls = []
    for step, (level, end) in enumerate(zip(levels, levels[1:], strict=False)):
        run.begin(level, scale(step))
        given = run.forecast(latent)
        if given is None:
            calls.append(step)
            given = run.end(latent, predict(latent, level))
        latent = given + (latent - given) * (end / level)
    return calls, latent


def bent(how):
    """Predictions [B, 4] that do not move with the latent, on a line over the noise level's angle where `how` is 0."""

    def predict(latent, level):
        made = latent.new_zeros(latent.shape)
        made[:, 1], made[:, 3] = 1.0, how * math.sin(9 * angle(level))
        return made

    return predict


def corrections_told(monkeypatch, host) -> list[bool]:
    """Whether each run of this host that ends from now on corrects."""
    seen: list[bool] = []

    class Watched(DeepCacheRun):
        def close(self):
            seen.append(self._correction is not None)
            super().close()

    monkeypatch.setattr(host, "DeepCacheRun", Watched)
    return seen
