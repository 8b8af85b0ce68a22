"""Noise levels: their angles, the sampler step of each, the order that they come in. Pure functions of numbers."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

SIGMA_TOLERANCE = 2e-4
"""Relative. Samplers recompute their sigmas in float32, and core moves the first of a flow by 1e-4; neighbouring ones
differ by 5e-3 or more."""


def step_of(sigma: float, schedule: Sequence[float]) -> int:
    """Index of the step that an evaluation at `sigma` belongs to.

    schedule: noise levels of a run, one more than it has steps, falling (or rising, when noise is added). Step i owns
    the levels from schedule[i] up to, but not including, schedule[i + 1]. So the midpoints of second-order samplers
    belong to the step that they refine; Heun's second evaluation, at the next step's own level, shares the decision of
    that next step.
    """
    starts = schedule[:-1]
    if schedule[0] >= schedule[-1]:
        passed = bisect_right([-start for start in starts], -sigma * (1 - SIGMA_TOLERANCE))
    else:
        passed = bisect_right(starts, sigma * (1 + SIGMA_TOLERANCE))
    return min(max(passed - 1, 0), len(starts) - 1)


def is_near(one: float, other: float) -> bool:
    """Whether they are the same noise level, as samplers compute it."""
    return abs(one - other) <= SIGMA_TOLERANCE * abs(one)


def is_in_order(schedule: Sequence[float]) -> bool:
    """Whether the noise levels only fall or only rise, as `step_of` assumes."""
    return list(schedule) in (sorted(schedule), sorted(schedule, reverse=True))


def is_in_window(level: float, window: Sequence[float]) -> bool:
    """Whether the noise level is in `window`: (highest, lowest), both included."""
    highest, lowest = window
    return lowest * (1 - SIGMA_TOLERANCE) <= level <= highest * (1 + SIGMA_TOLERANCE)


def angle(sigma: float, is_flow: bool = False) -> float:
    """The noise level as an angle in radians, from image (0) to noise (pi / 2). sigma: the ratio of noise to image; for
    rectified flow, the share of noise."""
    return math.atan2(sigma, 1.0 - sigma if is_flow else 1.0)


def stretch_of(place: float, changes: Sequence[float]) -> tuple[int, int]:
    """Which of the stretches between `changes`, noise levels in radians, lowest first, `place` is in."""
    # Both, since prompts begin at and below their level, and end below theirs.
    return bisect_left(changes, place), bisect_right(changes, place)
