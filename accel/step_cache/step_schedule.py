"""Which sampler step a noise level belongs to, whether that step is in a window, and what it puts at stake: pure
functions of numbers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

SIGMA_TOLERANCE = 1e-4
"""Relative; samplers compute their sigmas anew in float32, and neighbours differ by 5e-3 or more."""

LARGEST_SCALE = 16.0
"""Of noise to picture in `stake`; SD's schedule begins at 14.6, a flow's at infinity."""


def step_of(sigma: float, schedule: Sequence[float]) -> int:
    """The index of the step that an evaluation at `sigma` belongs to.

    `schedule` holds the noise levels of a run, one more than it has steps, falling (or rising, when
    noise is added). Step i owns the levels from schedule[i] up to, but without, schedule[i + 1], so
    the midpoints of second-order samplers are in the step that they refine; Heun's second evaluation,
    at the next step's own level, shares the decision of that next step.
    """
    starts = schedule[:-1]
    if schedule[0] >= schedule[-1]:
        passed = bisect_right([-start for start in starts], -sigma * (1 - SIGMA_TOLERANCE))
    else:
        passed = bisect_right(starts, sigma * (1 + SIGMA_TOLERANCE))
    return min(max(passed - 1, 0), len(starts) - 1)


def is_in_order(schedule: Sequence[float]) -> bool:
    """Whether the noise levels only fall, or only rise, as `step_of` takes them to."""
    return list(schedule) in (sorted(schedule), sorted(schedule, reverse=True))


def in_window(level: float, window: tuple[float, float]) -> bool:
    """Whether the noise level `level` is in `window`, (highest, lowest), both ends included."""
    highest, lowest = window
    return lowest * (1 - SIGMA_TOLERANCE) <= level <= highest * (1 + SIGMA_TOLERANCE)


def angle(sigma: float, is_flow: bool = False) -> float:
    """Where between picture (0) and noise (pi / 2) the level `sigma` is, in radians.

    sigma: the ratio of noise to picture; for rectified flow, the share of noise.
    """
    return math.atan2(sigma, 1.0 - sigma if is_flow else 1.0)


def stake(now: float, then: float) -> float:
    """What a relative error of the model's input-sized features does to the picture, in a step from the angle
    `now` to `then`: of the order of 1.

    The step replaces the share 1 - tan(then) / tan(now) of the noise by what the model says, and the
    latent is 1 / cos(now) times as large as the picture in it. High at the beginning, where the picture
    is decided, and at the end, where the steps are long.
    """
    noise = sorted((math.tan(now), math.tan(then)))
    return (noise[1] - noise[0]) / max(noise[1], 1e-9) * min(1 / max(math.cos(now), 1e-9), LARGEST_SCALE)
