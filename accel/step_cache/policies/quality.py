"""Skips as much as a quality target allows: what a skipped step costs is measured, and carried to the final latent.

In the spirit of SpeCa (Liu et al., arXiv 2509.11628: forecast, then verify) and ERTACache (Peng et al., arXiv
2508.21091: an error is injected by one step and amplified or damped by the later ones). No calibration: before a full
step the skipped path may run too, so that its prediction can be compared with the full one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.host_copy import HostCopy
from ..drift import Drift
from ..refresh import Step

LONGEST = 8
"""The most steps from one full step to the next, where the settings' interval is not above it."""

SHRINKS = 0.3
"""How much of an error in the latent the model's prediction takes back, at full noise; in proportion to the sine of the
noise level's angle. On the trained UNet an error keeps 0.75 of itself in the prediction above a noise level of 0.6, and
all of it below 0.4. Nothing is taken back where the sampler adds noise: what was decided differently stays so."""

GROWS, FALLS = 1.25, 0.75
"""Exponents of a forecast's error over the distance from the last full step, in radians of the noise level: beyond the
distance at which it was measured, and below. The trained UNet has 1.0 to 1.3 from one step to two, 0.5 from two to
three; each is taken at its pessimistic end."""

FADES = 2.0
"""A power of the noise level that the errors of skipped steps fall by at most; 1.4 on the trained UNet."""

OVERHEAD, OVERHEAD_OF_LONG_RUNS = 0.02, 0.1
"""The most of a run's work that comparisons may take beyond what skipped steps have saved. More is staked where it has
always come back on the trained networks: in long runs of samplers without noise of their own."""

LONG_RUN = 16
"""Steps."""

MARGIN_DB = 1.0
"""Aimed at above the target, since an estimate may be too low."""


Skipped = tuple[float, float]
"""A skipped step: its distance from the full step before it, in radians, and its `Carried.at_end`."""


@dataclass(frozen=True)
class Carried:
    """How errors of a run's steps reach its final latent, all as factors.

    Errors are those of the denoised prediction, and the latent is scaled so that the image in it has its own size.
    angles: of the steps' noise levels and of the end (`step_schedule.angle`). kept: of the difference between the
    latent and the prediction that a sampler keeps in a step, as a power of the ratio of both noise levels: 1 for
    samplers without noise of their own, 2 for ancestral ones (with eta 1), infinite where each step begins anew from
    the prediction, as LCM's. factor: by which a sampler that extrapolates its predictions enlarges an error.
    """

    angles: tuple[float, ...]
    kept: float = 1.0
    factor: float = 1.0

    def share_kept(self, step: int) -> float:
        """The share of the difference between latent and prediction that the sampler keeps in `step`."""
        start, end = (max(math.tan(at), 0.0) for at in self.angles[step : step + 2])
        ratio = min(end / start, 1.0) if start > 0 else 0.0
        return 0.0 if ratio == 0 or math.isinf(self.kept) else ratio**self.kept

    def passed_on(self, step: int) -> float:
        """The factor by which `step` carries an error in the latent on."""
        kept = self.share_kept(step)
        shrinks = SHRINKS * math.sin(self.angles[step]) if self.kept == 1 else 0.0
        return kept + (1 - kept) * (1 - shrinks)

    def at_end(self, step: int) -> float:
        """The factor by which an error in the prediction of `step` reaches the final latent."""
        result = self.factor * (1 - self.share_kept(step))
        for later in range(step + 1, len(self.angles) - 1):
            result *= self.passed_on(later)
        return result


class QualityRefresh:
    """Skips while the final latent is expected to stay within `target` dB of the uncached run's; for one run.

    The distance is PSNR with the final latent's own range (max - min) as its peak, of the sample of a batch that is
    farthest. Each stretch of skipped steps may add the share of what is left of it that its steps are of those left,
    which is near the best division: with errors that grow with the distance the cost of a step hardly depends on how
    fast features change there.

    Memory: one copy of the latent.
    """

    uses_drift = False
    uses_magnitudes = False
    compares_neighbours = False

    def __init__(self, target: float, interval: int):
        self.target = target
        self.longest = max(interval, LONGEST)
        self.carried: Carried | None = None
        self.probes = 0
        """Extra passes of the shallow part, to compare; counted by the run."""
        self.estimates: dict[int, float] = {}
        """Step → the final latent's error by estimate if it is skipped, as a share of its range; of each decided on."""
        self._allowed = 10 ** (-(target + MARGIN_DB) / 20)
        self._skipped: list[Skipped] = []
        """Since the last full step."""
        self._uncompared: list[Skipped] = []
        """Skipped steps before it, where the full step after them was not compared."""
        self._full: int | None = None
        self._sum: torch.Tensor | None = None
        """Error of the final latent, as far as it is known: the steps' errors have directions, and add up by them."""
        self._excess = 0.0
        """How many times too large the error of a single skipped step was when it was last asked for."""
        self._measured: list[_Measured] = []
        """The last two comparisons, the newest last."""

    def begin(self, angles: Sequence[float], kept: float = 1.0, factor: float = 1.0) -> None:
        """Note the run's noise levels. kept, factor: see `Carried`."""
        self.carried = Carried(tuple(angles), kept, factor)

    def should_refresh(self, step: Step, drift: Drift) -> bool:
        if self.carried is None or self._full is None or not 1 <= step.since_refresh < self.longest:
            return True
        measured = self._known(step.index)
        if measured is None:
            return True
        error = self._expected([*self._skipped, self._as_skipped(step.index)], measured)
        left = len(self.carried.angles) - 1 - self._full
        share = (step.since_refresh + 1) / left
        # `not <=` instead of `>`: NaN refreshes.
        spent = self._spent(measured)
        self.estimates[step.index] = math.hypot(spent, error)
        allowed = (self._allowed**2 - spent**2) * share
        if step.since_refresh == 1:
            self._excess = math.sqrt(error**2 / allowed) if allowed > 0 else math.inf
        return not error**2 <= allowed

    def wants_probe(self, step: int) -> bool:
        """Whether `step`, which will be full, is to be run by the skipped path first.

        Not where there is little left to decide, nor until errors may have become small enough to skip anything: with
        samplers that add noise, in the second half. Never with those that begin each step anew, whose predictions no
        forecast comes near.
        """
        if self.carried is None or self._full is None or not self._full < step < len(self.carried.angles) - 2:
            return False
        if math.isinf(self.carried.kept) or (self.carried.kept != 1 and 2 * step < len(self.carried.angles) - 1):
            return False
        if self._skipped or not self._measured:
            return True
        noise = [math.tan(self.carried.angles[at]) for at in (self._measured[-1].step, step)]
        return noise[1] * max(self._excess, 1.0) ** (1 / FADES) <= noise[0]

    def overhead(self) -> float:
        """What comparisons may cost beyond what skipped steps have saved, in full steps."""
        steps = len(self.carried.angles) - 1
        is_long = steps >= LONG_RUN and self.carried.kept == 1
        return steps * (OVERHEAD_OF_LONG_RUNS if is_long else OVERHEAD)

    def note_skipped(self, step: int) -> None:
        self._skipped.append(self._as_skipped(step))

    def note_full(self, step: int) -> None:
        self._uncompared += self._skipped
        self._full, self._skipped = step, []

    def compare(self, step: int, forecast: torch.Tensor, truth: torch.Tensor) -> None:
        """Learn from both predictions [B, ...] of the denoised latent at full `step`, before `note_full`.

        Nothing is learnt at another size than the first, as samplers that call the model at half size have it.
        """
        if self._sum is not None and self._sum.shape != truth.shape:
            return
        error = (forecast - truth).float()
        distance = self._distance(step)
        weight = sum((before / distance) ** FALLS * at_end for before, at_end in self._skipped)
        self._sum = torch.zeros_like(error) if self._sum is None else self._sum
        self._sum.add_(error, alpha=weight)
        flat = truth.flatten(1)
        peak = (flat.amax(1) - flat.amin(1)).float()
        norms = torch.stack([part.flatten(1).square().mean(1).sqrt() / peak for part in (error, self._sum)])
        self._measured = [*self._measured[-1:], _Measured(step, distance, HostCopy(norms.amax(1)), self._skipped)]
        self._skipped = []

    def estimated_db(self) -> float | None:
        """PSNR of the final latent by estimate; None before anything is known, infinite where nothing was skipped."""
        if not self._measured:
            return None
        measured = self._measured[-1]
        error = math.hypot(self._spent(measured), self._expected(self._skipped, measured))
        return -20 * math.log10(error) if error > 0 else math.inf

    def restart(self) -> None:
        """Note that the sampler went back up: nothing that it skipped until here is known to matter."""
        self._full = None
        self._skipped.clear()
        self._uncompared.clear()

    def close(self) -> None:
        self._sum = None
        self._measured.clear()

    def _distance(self, step: int) -> float:
        angles = self.carried.angles
        return max(abs(angles[step] - angles[self._full]), 1e-6)

    def _as_skipped(self, step: int) -> Skipped:
        return self._distance(step), self.carried.at_end(step)

    def _expected(self, stretch: Sequence[Skipped], measured: _Measured) -> float:
        """What a stretch of skipped steps adds to the final latent's error."""
        total = 0.0
        for distance, at_end in stretch:
            reach = distance / measured.distance
            total += measured.error * reach ** (GROWS if reach > 1 else FALLS) * at_end
        return total

    def _spent(self, measured: _Measured) -> float:
        """The final latent's error from what was skipped before the last full step."""
        newer = self._measured[-1].stretch if measured is not self._measured[-1] else ()
        expected = (self._expected(stretch, measured) for stretch in (newer, self._uncompared))
        return math.hypot(measured.spent, *expected)

    def _known(self, step: int) -> _Measured | None:
        """The comparison to decide `step` by: the newest, or the one before where the device would be waited for."""
        if len(self._measured) > 1 and self._measured[-1].numbers.is_later and self._measured[-1].step + 1 >= step:
            return self._measured[0]
        return self._measured[-1] if self._measured else None


@dataclass
class _Measured:
    """step: the full step. distance: to the full step before, in radians. numbers: error of its forecast, and of the
    final latent so far, both as shares of the latent's range. stretch: what was skipped before it."""

    step: int
    distance: float
    numbers: HostCopy
    stretch: Sequence[Skipped]

    @property
    def error(self) -> float:
        return self.numbers.read()[0].item()

    @property
    def spent(self) -> float:
        return self.numbers.read()[1].item()
