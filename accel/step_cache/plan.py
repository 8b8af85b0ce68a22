"""Which steps of a run are skipped: a floor that is safe without looking, and what the run has seen of itself.

Each full step shows for nothing how far its prediction is from what the full steps before it foretell. A step is
skipped where that, carried to the image, leaves the quality that was asked for within reach; no step is skipped for
anything else, and nothing is learnt from other images. In the spirit of SpeCa (Liu et al., arXiv 2509.11628: forecast,
then verify) and ERTACache (Peng et al., arXiv 2508.21091: an error is injected by one step and carried on by the later
ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..core.host_copy import HostCopy
from .sampler_facts import SamplerFacts

FORMING, FORMING_SHARE = 1.3, 0.4
"""Radians of the noise level above which no step is skipped, since the picture is not there yet: about the first
quarter of the usual schedules. Of schedules that stay there longer, as those of large flow models, so much of the
steps."""

LOOK_BACK = 2
"""How many of the newest full steps decide, by the largest of their errors: one may happen to be near its forecast."""

PRICE = 3.0
"""What skipping a step may add to the squared error, over the even share of a step of what is left."""

TOUCHY = 1.2
"""How much faster than anywhere before the prediction may change as the noise falls. Images settle: it changes less and
less. Where it does not, the image is undecided late, and what a skipped step changes is enlarged up to twenty times:
nothing is skipped any more."""

LONGEST = 3
"""The most steps from one full step to the next. With 4, images below 36 dB of the target lose more than the skipped
work is worth: fewer steps are closer."""


class Plan(Protocol):
    """Decides for one run which steps are skipped. Steps are asked about in their order, each once."""

    points: int
    """How many of the last full steps a skipped one is forecast from; 1 repeats the last."""

    def begin(self, facts: SamplerFacts) -> None:
        """The run begins, or goes back to its beginning."""

    def skips(self, step: int) -> bool:
        """Whether `step` may be skipped; never the first one after `begin`."""

    def note_skipped(self, step: int) -> None: ...

    def note_full(self, step: int) -> None: ...

    def note_shown(self, step: int, shown: torch.Tensor) -> None:
        """What full `step` showed, on the device, for each sample, as shares of the latent's range: the root mean
        square of its forecast's error, and of its difference from the full step before [2, B]."""


class QualityPlan:
    """Keeps the final latent within `target` dB (PSNR, its range as the peak) of the uncached run's, by estimate."""

    points = 2

    def __init__(self, target: float):
        self.target = target
        self._allowed = 10 ** (-target / 10)

    def begin(self, facts: SamplerFacts) -> None:
        self._facts = facts
        self._fulls: list[int] = []
        """Full steps, in order."""
        self._coming: dict[int, tuple[HostCopy, float, float]] = {}
        """Full step → what it showed, on the way from the device, its `_reach`, and its distance in radians."""
        self._bends: dict[int, float] = {}
        """Full step → how far predictions bend there: its error over its reach."""
        self._least: torch.Tensor | None = None
        """The slowest that the prediction of each sample has changed [B], per radian."""
        self._is_touchy = False
        self._stretches: dict[int, float] = {}
        """Full step → what was skipped before it, as `_part` adds it up."""
        self._open = 0.0
        """What was skipped since the last full step, as `_part` adds it up."""

    def skips(self, step: int) -> bool:
        facts = self._facts
        self._learn(step)
        is_last = step >= facts.steps - 1
        if self._is_forming(step) or is_last or self._is_touchy or not self._bends:
            return False
        if not 1 <= step - self._fulls[-1] < LONGEST:
            return False
        bend = max(list(self._bends.values())[-LOOK_BACK:])
        spent = sum((part * self._bends.get(full, bend)) ** 2 for full, part in self._stretches.items())
        before, after = ((bend * part) ** 2 for part in (self._open, self._open + self._part(step)))
        room, left = self._allowed - spent, facts.steps - step
        # `not >` would skip where it is NaN.
        return after - before <= PRICE * (room - before) / max(left, PRICE)

    def note_skipped(self, step: int) -> None:
        self._open += self._part(step)

    def note_full(self, step: int) -> None:
        if self._open:
            self._stretches[step] = self._open
        self._open = 0.0
        self._fulls.append(step)

    def note_shown(self, step: int, shown: torch.Tensor) -> None:
        reach = self._reach(step, self._fulls[:-1])
        if reach:
            distance = abs(self._facts.angles[step] - self._facts.angles[self._fulls[-2]])
            self._coming[step] = HostCopy(shown), reach, distance

    def _is_forming(self, step: int) -> bool:
        return self._facts.angles[step] > FORMING and step < FORMING_SHARE * self._facts.steps

    def _learn(self, step: int) -> None:
        """Take what full steps showed and the host need not wait for at `step`: equal runs decide equally."""
        for full, (shown, reach, distance) in list(self._coming.items()):
            if shown.is_later and full + 1 >= step:
                continue
            del self._coming[full]
            error, change = shown.read().double()
            self._bends[full] = error.max().item() / reach
            if not self._is_forming(full):
                pace = change / distance
                least = pace if self._least is None or self._least.shape != pace.shape else self._least
                self._is_touchy |= not bool((pace <= TOUCHY * least).all())
                self._least = torch.minimum(pace, least)

    def _reach(self, step: int, fulls: Sequence[int]) -> float:
        """How a line through the last two of these full steps errs with the distance: as the remainder of a polynomial
        through two points does, for a curve of equal bend."""
        if len(fulls) < 2:
            return 0.0
        here, newest, older = (self._facts.angles[at] for at in (step, fulls[-1], fulls[-2]))
        return abs(here - newest) * abs(here - older)

    def _part(self, step: int) -> float:
        return self._facts.gain(step) * self._reach(step, self._fulls)
