"""DeepCache as in its paper, where a test needs to know which steps are skipped and what they use."""

import torch
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.run import DeepCacheRun


def uniform_hold(interval=3, depth=None, **settings):
    return DeepCacheSettings(interval, depth, **({"schedule": "uniform", "between": "hold"} | settings))


ADAPTIVE = {"schedule": "adaptive", "interval": 100}
SCHEDULE = (14.6, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0)


class Sampler:
    """Drives a run with a 'model' whose fresh feature, and whose shallow one, is the sigma that it is computed at."""

    def __init__(self, levels=SCHEDULE, **settings):
        self.run = DeepCacheRun(uniform_hold(**settings))
        self.run.schedule = levels
        self.skipped = []

    def evaluate(self, sigma, *calls):
        """The features, one list a call, that the shallow part gets; a call is a string of uuids."""
        self.run.begin_evaluation(sigma)
        return [self.call(sigma, uuids) for uuids in calls]

    def call(self, sigma, uuids, batch=2, size=8, window=None, conds=None):
        x = torch.zeros(batch * len(uuids), 4, size, size)
        keys = self.run.branches(x, list(uuids), conds or list(range(len(uuids))), window)
        if keys is None:
            return None
        fresh = torch.full((batch * len(uuids), 3, size, size), float(sigma))
        self.run.measure(keys, fresh)
        skip = self.run.can_skip(keys)
        feature = self.run.gather(keys) if skip else self.run.exchange(keys, fresh)
        self.run.count(skip)
        self.skipped.append(skip)
        return [chunk.mean().item() for chunk in feature.chunk(len(uuids))]

    def full_sigmas(self, *sigmas, uuids="a"):
        """Which of these evaluations are computed in full."""
        before = len(self.skipped)
        for sigma in sigmas:
            self.evaluate(sigma, uuids)
        return [sigma for sigma, skipped in zip(sigmas, self.skipped[before:], strict=True) if not skipped]
