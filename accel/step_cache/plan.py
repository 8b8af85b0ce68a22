"""Which steps of a run are skipped: as many as one allowance of error for the whole image pays for, where they cost
least.

Each full step shows for nothing how far its prediction is from what the full steps before it foretell. That, and what
the sampler makes of an error, tells what each way through the steps that are left would cost; the cheapest in work that
can be paid for is taken until the next full step shows more. Nothing is learnt from other images. In the spirit of
SpeCa (Liu et al., arXiv 2509.11628: forecast, then verify) and ERTACache (Peng et al., arXiv 2508.21091: an error is
injected by one step and carried on by the later ones).
"""

from __future__ import annotations

import math

import torch

from ..core.host_copy import HostCopy
from .sampler_facts import SamplerFacts

LONGEST = 4
"""The most steps from one full step to the next."""

LOOK_BACK = 2
"""How many of the newest full steps decide, by the largest of their errors: one may happen to be near its forecast."""

CORRECTED = 0.7
"""How much of a skipped step's error turns from that of an extrapolation to that of an interpolation once the next full
step has corrected it."""

REACHES_IMAGE = 0.6
"""How much of the estimated error is there in the final image, on the trained networks, where a full step follows:
later steps take back the rest."""


class QualityPlan:
    """Keeps the final latent within `target` dB (PSNR, its range as the peak) of the uncached run's, by estimate.

    Steps are asked about in their order, each once. Errors are shares of the latent's range; costs are their squares,
    for predictions of a curvature of 1 (`_line_error`).
    """

    points = 2
    """How many of the last full steps a skipped one is forecast from."""

    def __init__(self, target: float):
        self.target = target
        self._allowed = 10 ** (-target / 10)

    def begin(self, facts: SamplerFacts) -> None:
        """The run begins, or goes back to its beginning. facts: without a response where nothing is corrected."""
        self._facts = facts
        self._fulls: list[int] = []
        """Full steps, in order."""
        self._next_full = 0
        """The step up to which all are skipped."""
        self._pending: dict[int, tuple[HostCopy, float]] = {}
        """Full step → what it showed, on the way from the device, and its `_line_error`."""
        self._curvatures: dict[int, float] = {}
        """Full step → how far predictions bend there: its error over its `_line_error`."""
        self._skipped: dict[int, float] = {}
        """Full step → the cost of what was skipped before it."""
        self._cheapest: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def skips(self, step: int) -> bool:
        """Whether `step` may be skipped; never the first one after `begin`. On a device the host waits for what the
        last full step showed: that is over sooner than another full step."""
        if step < self._next_full:
            return True
        for full, (shown, line_error) in self._pending.items():
            self._curvatures[full] = shown.read().double().max().item() / line_error
        self._pending.clear()
        newest = list(self._curvatures.values())[-LOOK_BACK:]
        if not newest or not all(map(math.isfinite, newest)) or self._fulls[-1] != step - 1:
            return False
        curvature = max(newest)
        spent = sum(cost * self._curvatures.get(full, curvature) ** 2 for full, cost in self._skipped.items())
        self._next_full = self._next(step - 1, curvature, self._allowed - spent)
        return step < self._next_full

    def note_full(self, step: int) -> None:
        if self._fulls and step - self._fulls[-1] > 1:
            self._skipped[step] = self._cost(self._fulls[-1], self._gap, step)
        self._fulls.append(step)
        self._next_full = 0

    def note_shown(self, step: int, error: torch.Tensor) -> None:
        """How far the prediction of full `step` was from its forecast [B], root mean squares on the device."""
        if len(self._fulls) > 2 and (line_error := self._line_error(step, *self._fulls[-2:-4:-1])):
            self._pending[step] = HostCopy(error), line_error

    @property
    def _gap(self) -> int:
        """Steps from the last full step but one to the last one."""
        return min(self._fulls[-1] - self._fulls[-2], LONGEST) if len(self._fulls) > 1 else 1

    def _next(self, full: int, curvature: float, budget: float) -> int:
        """The next full step after `full` on the way with the fewest of them that costs no more than `budget`."""
        if not self._cheapest:
            self._find_cheapest()
        costs, after = self._cheapest[full, self._gap]
        affordable = (costs * curvature**2 <= budget).nonzero()
        return int(after[affordable[0]]) if len(affordable) else full + 1

    def _find_cheapest(self) -> None:
        """From each full step, by the gap before it, to the end: by the number of full steps on the way [steps] the
        least cost, and the first of these steps."""
        steps = self._facts.steps
        for full in range(steps - 1, 0, -1):
            places = range(full + 1, min(full + LONGEST, steps) + 1)
            for gap in range(1, min(LONGEST, full) + 1):
                costs = torch.full((len(places), steps), math.inf, device="cpu")
                for row, after in zip(costs, places, strict=True):
                    cost = self._cost(full, gap, after)
                    if after == steps:
                        row[0] = cost
                    else:
                        row[1:] = cost + self._cheapest[after, after - full][0][:-1]
                least, place = costs.min(0)
                self._cheapest[full, gap] = least, place + full + 1

    def _cost(self, full: int, gap: int, after: int) -> float:
        """The cost of skipping all steps from `full`, `gap` steps after the one before, up to `after`. Their errors
        point the same way."""
        is_followed, error = after < self._facts.steps, 0.0
        for step in range(full + 1, after):
            line_error = self._line_error(step, full, full - gap)
            if is_followed and self._facts.response is not None:
                line_error += CORRECTED * (self._line_error(step, full, after) - line_error)
            error += (REACHES_IMAGE if is_followed else 1.0) * self._facts.gain(step) * line_error
        return error**2

    def _line_error(self, step: int, one: int, other: int) -> float:
        """The error of a line through two full steps, for a curvature of 1.

        As the remainder of a polynomial through two points, it grows with the distances. Predictions bend the more the
        more noise there is; over its ratio to the image about evenly.
        """
        here, there, beyond = (self._facts.angles[at] for at in (step, one, other))
        return abs(here - there) * abs(here - beyond) / max(math.cos(here), 1e-3)
