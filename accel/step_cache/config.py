"""The settings of DeepCache, and the refresh policies that they choose from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .policies.quality import QualityRefresh
from .refresh import AdaptiveRefresh, RefreshPolicy, UniformRefresh

POLICIES: dict[str, Callable[[int, float], RefreshPolicy]] = {
    "uniform": UniformRefresh,
    "adaptive": AdaptiveRefresh,
}
"""Values of `schedule`, each with what makes its policy from `interval` and `threshold`.

A new caching method is a class that follows `refresh.RefreshPolicy` and one entry here.
"""

BETWEEN = ("hold", "forecast")


@dataclass(frozen=True)
class DeepCacheSettings:
    """How often a run (the sampling of one image or batch) skips, and how exactly.

    `DeepCacheSettings(interval=3)` lets the features decide: of 20 to 40 steps it skips about half, of the 4 to 8 steps
    of a distilled model few or none.

    interval: the most sampler steps from one full step to the next; 1 switches caching off, more is faster and less
        exact.
    depth: how much of the model still runs on a skipped step, counted in skip connections of a UNet, from the
        outermost, and in blocks at either end of a transformer; more is slower. None (or 0): nothing, but where a
        sampler adds noise in its steps, of which a UNet's deep part knows nothing, a UNet's outermost layers.
    start_percent, end_percent: the part of sampling, as fractions of the noise schedule, in which steps are skipped.
        Every step outside it is full; equal values switch caching off.
    schedule: a key of `POLICIES`. "uniform" refreshes every `interval` steps. "adaptive" refreshes after `interval`
        steps at the latest, and earlier when the drift of the shallow features that is expected for the coming step,
        times its step weight, is above `threshold`.
    threshold: for "adaptive", relative L1 drift times `step_schedule.step_weight`; 0 makes every step full, more is
        faster and less exact.
    between: what a skipped step uses: "hold" the feature of the last full step, "forecast" an extrapolation from the
        last full steps.
    quality: PSNR in dB of the final latent to the uncached run's, of the farthest sample of a batch, with the latent's
        own range (max - min) as the peak. The run skips what that allows, by its own estimate: schedule and threshold
        have no say; from one full step to the next there are at most as many steps as the largest of `interval`,
        `policies.quality.LONGEST` and `LONGEST_SHARE` of the run's. None leaves it to them.

    Raises ValueError, with the valid range, for anything else.
    """

    interval: int = 3
    depth: int | None = None
    start_percent: float = 0.0
    end_percent: float = 1.0
    schedule: str = "adaptive"
    threshold: float = 0.05
    between: str = "forecast"
    quality: float | None = None

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"DeepCache: interval {self.interval} is below 1 (1 = off).")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"DeepCache: depth {self.depth} is below 0 (0 = automatic).")
        for name in ("start_percent", "end_percent"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"DeepCache: {name} {getattr(self, name)} is outside 0.0 to 1.0.")
        if self.start_percent > self.end_percent:
            raise ValueError(
                f"DeepCache: start_percent {self.start_percent} is above end_percent {self.end_percent}; "
                f"it must be 0.0 to {self.end_percent}."
            )
        if self.schedule not in POLICIES:
            raise ValueError(f"DeepCache: schedule is {self.schedule!r}; it must be one of: {', '.join(POLICIES)}.")
        if not 0.0 <= self.threshold < math.inf:
            raise ValueError(f"DeepCache: threshold {self.threshold} is not a number from 0 up (0 skips nothing).")
        if self.between not in BETWEEN:
            raise ValueError(f"DeepCache: between is {self.between!r}; it must be one of: {', '.join(BETWEEN)}.")
        if self.quality is not None and not 0.0 < self.quality < math.inf:
            raise ValueError(f"DeepCache: quality {self.quality} is not a number of dB above 0 (None sets no target).")
        if self.depth == 0:
            object.__setattr__(self, "depth", None)

    @property
    def is_off(self) -> bool:
        """Whether every step of every run is full."""
        return self.interval == 1 or self.start_percent == self.end_percent

    def policy(self) -> RefreshPolicy:
        """A refresh policy for one run."""
        if self.quality is not None:
            return QualityRefresh(self.quality, self.interval)
        return POLICIES[self.schedule](self.interval, self.threshold)


QUALITIES: dict[str, DeepCacheSettings | None] = {
    "Exact": None,
    "Balanced": DeepCacheSettings(),
    "Fast": DeepCacheSettings(interval=5, threshold=0.07),
}
"""Settings for people who choose by the picture: None skips nothing. docs/deepcache.md has what each costs."""


def checked_depth(depth: int, max_depth: int) -> int:
    """`depth` itself. Raises ValueError, with the range, outside `1 .. max_depth`."""
    if not 1 <= depth <= max_depth:
        raise ValueError(f"DeepCache: depth {depth} is outside this model's range 1 to {max_depth} (0 = automatic).")
    return depth
