"""Which steps of a run are skipped: as many as one allowance of error for the whole image pays for, where they cost
least.

Each full step shows for nothing what is wrong with forecasts: its own prediction is off the line through the full steps
before it, and those of skipped steps can be interpolated once it is there. That, and what the sampler makes of an
error, tells what each way through the steps that are left would cost. What was decided is paid as it was believed to
cost: one reading neither ends nor frees a run. Nothing is learnt from other images. In the spirit of SpeCa (Liu et al.,
arXiv 2509.11628: forecast, then verify) and ERTACache (Peng et al., arXiv 2508.21091: an error is injected by one step
and carried on by the later ones).
"""

from __future__ import annotations

import math

import torch

from ..core.host_copy import HostCopy
from .sampler_facts import SamplerFacts

FIRST, WARM_UP = 3, 0.1
"""How many steps run in full at the beginning, and at least which share of all: the first steps of large models decide
the composition."""

LATE = 24
"""How many run in full at the end, over the number of steps: the fewer there are, the more of them change much. Of
six steps or fewer that is all."""

LONGEST = 3
"""The most steps from one full step to the next."""

EVERY_STEP_DB = 80.0
"""The dB for which every step runs: the share of full steps is at least the target's of it, half for *Balanced*. Large
models make more of an error than small ones show; what is published of them bears as much."""

CORRECTED, UNCORRECTED = 1.1, 0.4
"""How much of the error of skipped steps is there in the image on the trained networks, as interpolation and as
extrapolation make it. Samplers that add noise count as uncorrected, though they are corrected."""

TAKEN_BACK = 0.8
"""How much of that later steps take back where there is nothing but noise, and by its share elsewhere."""

AT_END = 2.5
"""How much more is left where fewer full steps follow, over the square of their number."""

IN_A_ROW = 2.0
"""How much more two steps in a row cost than a smooth line would make of them."""


class QualityPlan:
    """Keeps the final latent within `target` dB (PSNR, its range as the peak) of the uncached run's, by estimate.

    Steps are asked about in their order, each once. Errors are shares of the latent's range; costs are their squares,
    for predictions that bend as much as the share of noise (`_bend`).
    """

    def __init__(self, target: float):
        self.target = target

    def begin(self, facts: SamplerFacts) -> None:
        """The run begins, or goes back to its beginning."""
        self._facts = facts
        self._left = 10 ** (-self.target / 10)
        """How much of the allowance is left, as a cost."""
        self._fulls: list[int] = []
        self._next_full = 0
        """The step up to which all are skipped."""
        self._pending: tuple[HostCopy, float] | None = None
        """What the last full step showed, on its way from the device, and for which bend."""
        self._shown: list[float] = []
        """How far predictions bend, by each full step that showed it."""
        self._ways: list[dict[int, tuple[float, int]]] = []

    def skips(self, step: int) -> bool:
        """Whether `step` may be skipped. On a device the host waits for what the last full step showed: that is over
        sooner than another full step."""
        if step < self._next_full:
            return True
        if self._pending is not None:
            (error, bend), self._pending = self._pending, None
            self._shown.append(error.read().double().max().item() / bend)
        if not self._shown or self._fulls[-1] != step - 1 or not all(map(math.isfinite, self._shown[-2:])):
            return False
        squared = math.prod(self._shown[-2:]) ** (2 / len(self._shown[-2:]))
        self._ways = self._ways or self._find_ways()
        least = math.ceil(self._facts.steps * self.target / EVERY_STEP_DB) - len(self._fulls)
        for fulls, (cost, after) in sorted(self._ways[step - 1].items()):
            if fulls >= least and cost * squared <= self._left:
                self._next_full = after
                self._left -= squared * self._cost(step - 1, after)
                break
        return step < self._next_full

    def note_full(self, step: int) -> None:
        self._fulls.append(step)
        self._next_full = 0

    def note_errors(self, errors: dict[int, torch.Tensor]) -> None:
        """At a full step: what each of the steps that were skipped before it got wrong [B], root mean squares on the
        device; where none was, what is wrong with the forecast of its own."""
        if len(self._fulls) > 2:
            now, before, first = self._fulls[:-4:-1]
            bend = sum(self._bend(step, (step - before) * (now - first)) for step in errors)
            self._pending = HostCopy(sum(errors.values())), bend

    def _bend(self, step: int, distances: int) -> float:
        """distances: to two full steps, multiplied, as in the remainder of a line through them."""
        return max(distances * self._facts.noise_shares[step], 1e-6)

    def _cost(self, full: int, after: int) -> float:
        """The cost of skipping all steps between two full ones. Their errors point the same way."""
        is_corrected = self._facts.response is not None and not self._facts.adds_noise
        error = 0.0
        for step in range(full + 1, after):
            other = after - step if is_corrected else step - full + 2  # the line's other point
            kept = 1 - TAKEN_BACK * self._facts.noise_shares[step] * is_corrected
            error += kept * self._facts.gain(step) * self._bend(step, (step - full) * other)
        error *= CORRECTED if is_corrected else UNCORRECTED
        error *= IN_A_ROW ** (after - full > 2) * (1 + AT_END / max(self._facts.steps - after, 1) ** 2)
        return error**2

    def _find_ways(self) -> list[dict[int, tuple[float, int]]]:
        """From each full step to the end: by the number of full steps on the way the least cost, and the first of
        them."""
        steps = self._facts.steps
        first = max(FIRST, math.ceil(WARM_UP * steps))
        last = steps - max(1, round(LATE / steps))
        ways: list[dict[int, tuple[float, int]]] = [{} for _ in range(steps)] + [{0: (0.0, steps)}]
        for full in reversed(range(steps)):
            for after in range(full + 1, min(full + LONGEST, steps) + 1):
                if after > full + 1 and (full + 1 < first or after > last):
                    continue
                cost = self._cost(full, after)
                for fulls, (rest, _) in ways[after].items():
                    known = ways[full].get(fulls + (after < steps), (math.inf, 0))
                    ways[full][fulls + (after < steps)] = min(known, (cost + rest, after))
        return ways
