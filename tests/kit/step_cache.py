"""Runs of the step cache whose skipped steps a test knows beforehand."""

import math
from dataclasses import dataclass

import torch
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.sampler_facts import SamplerFacts

SCHEDULE = (14.6, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0)


class EveryFew:
    """A plan: full every `interval` steps, whatever the run shows; from the last full step, or `points` of them."""

    def __init__(self, interval, points=1):
        self.interval, self.points = interval, points
        self.shown = {}

    def begin(self, facts):
        self.full = None

    def skips(self, step):
        return self.full is not None and 0 < step - self.full < self.interval

    def note_full(self, step):
        self.full = step

    def note_shown(self, step, shown):
        self.shown[step] = shown


@dataclass(frozen=True)
class EveryFewSettings(DeepCacheSettings):
    """Settings with that plan."""

    interval: int = 3
    points: int = 1

    @property
    def is_off(self):
        return self.interval == 1 or super().is_off

    def plan(self):
        return EveryFew(self.interval, self.points)


def every(interval=3, *, points=1, **settings):
    """As in DeepCache's paper: full every `interval` steps, the feature held in between."""
    return EveryFewSettings(interval=interval, points=points, **settings)


def run_of(settings=None, levels=SCHEDULE, find=lambda model: model, window=(math.inf, 0.0), adds_noise=False, **more):
    """A run on these noise levels. find: from a model to its split; a split may stand for its own model."""
    is_flow = more.pop("is_flow", False)
    return DeepCacheRun(settings or every(), SamplerFacts(tuple(levels), is_flow, adds_noise), find, window, **more)


def features_of(split, settings=None, **run):
    """The features of one split, in a run of its own."""
    return run_of(settings, find=lambda model: split, **run).of(split)


class Sampler:
    """Drives a run with a 'model' whose fresh feature is the sigma that it is computed at."""

    def __init__(self, levels=SCHEDULE, settings=None, **run):
        self.run = run_of(settings, levels, **run)
        self.features = self.run.of(torch.nn.Identity())
        self.skipped = []

    def evaluate(self, sigma, *calls):
        """The features, one list a call, that the shallow part gets; a call is a string of uuids."""
        self.run.begin(sigma)
        return [self.call(sigma, uuids) for uuids in calls]

    def call(self, sigma, uuids, batch=2, size=8, window=None, conds=None):
        x = torch.zeros(batch * len(uuids), 4, size, size)
        keys = self.features.branches(x, list(uuids), conds or list(range(len(uuids))), window)
        if keys is None:
            return None
        fresh = torch.full((batch * len(uuids), 3, size, size), float(sigma))
        skip = self.features.can_skip(keys)
        feature = self.features.gather(keys) if skip else self.features.exchange(keys, fresh)
        self.run.count(skip)
        self.skipped.append(skip)
        return [chunk.mean().item() for chunk in feature.chunk(len(uuids))]

    def full_sigmas(self, *sigmas, uuids="a"):
        """Which of these evaluations are computed in full."""
        before = len(self.skipped)
        for sigma in sigmas:
            self.evaluate(sigma, uuids)
        return [sigma for sigma, skipped in zip(sigmas, self.skipped[before:], strict=True) if not skipped]


def corrections_told(monkeypatch, host) -> list[bool]:
    """Whether each run of this host that ends from now on corrects."""
    seen: list[bool] = []

    class Watched(DeepCacheRun):
        def close(self):
            seen.append(self._correction is not None)
            super().close()

    monkeypatch.setattr(host, "DeepCacheRun", Watched)
    return seen
