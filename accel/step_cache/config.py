"""The settings of the step cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .plan import QualityPlan

BALANCED, FAST = 40.0, 35.0
"""What *Balanced* and *Fast* plan for, in dB."""


@dataclass(frozen=True)
class DeepCacheSettings:
    """How close a run (the sampling of one image or batch) stays to the uncached one.

    On the trained test networks `DeepCacheSettings()` skips 37 % of the work of 20 steps and 43 % of 30.

    quality: PSNR in dB of the final latent to the uncached run's, of the farthest sample of a batch, with the latent's
        own range (max - min) as the peak, that the run plans for.
    start_percent, end_percent: the part of sampling, as fractions of the noise schedule, in which steps are skipped.
        Every step outside it is full; equal values switch caching off.

    Raises ValueError, with the valid range, for anything else.
    """

    quality: float = BALANCED
    start_percent: float = 0.0
    end_percent: float = 1.0

    def __post_init__(self) -> None:
        for name in ("start_percent", "end_percent"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"DeepCache: {name} {getattr(self, name)} is outside 0.0 to 1.0.")
        if self.start_percent > self.end_percent:
            start, end = self.start_percent, self.end_percent
            raise ValueError(f"DeepCache: start_percent ({start}) must not be above end_percent ({end}).")
        if not 0.0 < self.quality < math.inf:
            raise ValueError(f"DeepCache: quality {self.quality} is not a number of dB above 0.")

    @property
    def is_off(self) -> bool:
        """Whether every step of every run is full."""
        return self.start_percent == self.end_percent

    def plan(self) -> QualityPlan:
        """A plan for one run."""
        return QualityPlan(self.quality)


QUALITIES: dict[str, DeepCacheSettings | None] = {
    "Exact": None,
    "Balanced": DeepCacheSettings(),
    "Fast": DeepCacheSettings(FAST),
}
"""Settings for people who choose by the picture: None skips nothing. docs/deepcache.md has what each costs."""
