"""The settings of the step cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .plan import Plan, QualityPlan

BALANCED, FAST = 40.0, 35.0
"""What *Balanced* and *Fast* plan for, in dB."""


@dataclass(frozen=True)
class DeepCacheSettings:
    """How close a run (the sampling of one image or batch) stays to the uncached one.

    `DeepCacheSettings()` skips about 40 % of the work of 20 to 50 steps, and nothing of the 4 to 8 steps of a distilled
    model.

    quality: PSNR in dB of the final latent to the uncached run's, of the farthest sample of a batch, with the latent's
        own range (max - min) as the peak, that the run plans for.
    start_percent, end_percent: the part of sampling, as fractions of the noise schedule, in which steps are skipped.
        Every step outside it is full; equal values switch caching off.
    depth: how much of the model still runs on a skipped step, counted in skip connections of a UNet, from the
        outermost, and in blocks at either end of a transformer; more is slower. None (or 0): nothing, but where a
        sampler adds noise in its steps, of which a UNet's deep part knows nothing, a UNet's outermost layers.

    Raises ValueError, with the valid range, for anything else.
    """

    quality: float = BALANCED
    start_percent: float = 0.0
    end_percent: float = 1.0
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"DeepCache: depth {self.depth} is below 0 (0 = automatic).")
        for name in ("start_percent", "end_percent"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"DeepCache: {name} {getattr(self, name)} is outside 0.0 to 1.0.")
        if self.start_percent > self.end_percent:
            raise ValueError(
                f"DeepCache: start_percent ({self.start_percent}) must not be above end_percent ({self.end_percent})."
            )
        if not 0.0 < self.quality < math.inf:
            raise ValueError(f"DeepCache: quality {self.quality} is not a number of dB above 0.")
        if self.depth == 0:
            object.__setattr__(self, "depth", None)

    @property
    def is_off(self) -> bool:
        """Whether every step of every run is full."""
        return self.start_percent == self.end_percent

    def plan(self) -> Plan:
        """A plan for one run."""
        return QualityPlan(self.quality)


QUALITIES: dict[str, DeepCacheSettings | None] = {
    "Exact": None,
    "Balanced": DeepCacheSettings(),
    "Fast": DeepCacheSettings(FAST),
}
"""Settings for people who choose by the picture: None skips nothing. docs/deepcache.md has what each costs."""


def checked_depth(depth: int, max_depth: int) -> int:
    """`depth` itself. Raises ValueError, with the range, outside `1 .. max_depth`."""
    if not 1 <= depth <= max_depth:
        raise ValueError(f"DeepCache: depth {depth} is outside this model's range 1 to {max_depth} (0 = automatic).")
    return depth
