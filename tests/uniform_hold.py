"""DeepCache as in its paper, where a test needs to know which steps are skipped and what they use."""

from comfy_accel.accel.step_cache.config import DeepCacheSettings


def uniform_hold(interval=3, depth=None, **settings):
    return DeepCacheSettings(interval, depth, **({"schedule": "uniform", "between": "hold"} | settings))
