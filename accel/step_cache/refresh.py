"""Refresh policies: which steps of a run are computed in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .policies.drift import Drift
from .step_schedule import step_weight


@dataclass(frozen=True)
class Step:
    """A step that a run may skip.

    index: its place in the run's schedule. since_refresh: steps since the last full one; below 1 where a sampler that
    looked ahead comes back. start, end: its noise levels as angles in radians (`step_schedule.angle`). drift_scale:
    what drift counts; above 1 where it is that of the latent instead of features.
    """

    index: int
    since_refresh: int
    start: float
    end: float
    drift_scale: float = 1.0


class RefreshPolicy(Protocol):
    """Decides for one run which steps are full.

    Asked once a step, and only where the run is free to choose: not for the first step, nor for those outside the
    settings' window.
    """

    uses_drift: bool
    """Whether the run measures the drift of its shallow features, or of the latent where it has none; that takes one
    copy of them for each CFG branch."""

    def should_refresh(self, step: Step, drift: Drift) -> bool:
        """Whether `step` is computed in full."""


@dataclass(frozen=True)
class UniformRefresh:
    """Refreshes every `interval` steps; other policies inherit this bound."""

    interval: int
    threshold: float

    uses_drift = False

    def should_refresh(self, step: Step, drift: Drift) -> bool:
        return step.since_refresh >= self.interval


class AdaptiveRefresh(UniformRefresh):
    """Refreshes when the expected drift times the step's weight is above `threshold`, and every `interval` steps."""

    uses_drift = True

    def should_refresh(self, step: Step, drift: Drift) -> bool:
        if super().should_refresh(step, drift):
            return True
        expected, weight = drift.predicted(step.index), step.drift_scale * step_weight(step.start, step.end)
        # `not <=` instead of `>`: NaN refreshes.
        return expected is None or not expected * weight <= self.threshold
