"""Skips as much as a quality target allows: what a skipped step costs is measured, and carried to the final latent.

In the spirit of SpeCa (Liu et al., arXiv 2509.11628: forecast, then verify) and ERTACache (Peng et al., arXiv
2508.21091: an error is injected by one step and amplified or damped by the later ones). No calibration: at each full
step the deep feature's forecast is compared with the feature itself, which is there anyway. What such an error of the
feature does to the prediction is learnt: in a model's first runs the skipped path now and then runs beside the full
one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from ...core.host_copy import HostCopy
from ..refresh import Step
from .drift import Drift
from .sensitivity import Sensitivity

LONGEST, LONGEST_SHARE = 4, 1 / 8
"""The most steps from one full step to the next, at least and as a share of the run's, where the settings' interval is
not above it. After a longer stretch the next forecasts, which begin from points as far apart, are worse."""

PRICE = 3.0
"""What skipping one step may add, over the even share of a step of what the steps left may add. Somewhat more than half
of them are skipped, most for less than the price."""

SUNK = 0.15
"""The share of what is spent that the steps left may add in any case: 0.6 dB. An estimate that rises in mid-run may
leave nothing; steps that cost next to nothing beside what cannot be undone are skipped all the same."""

PASSED_ON = 0.65
"""The share of a skipped step's error that later steps pass on to the final latent. On the trained networks they take a
third to two thirds of it back below a noise level of 2, and enlarge it above, by how much differs between images."""

PASSED_ON_EXTRAPOLATED = 1.2
"""The same where a sampler extrapolates. Later steps take nothing back of that."""

CORRECTED_EARLY = 0.4
"""The same where full steps correct skipped ones, of errors at pure noise. Without noise all is passed on; between them
it changes geometrically with the noise level in radians. With one share for all, the cost of skipped steps was
estimated 5 to 14 dB too high in the middle of a run, and about right at its end (docs/lab/deepcache.md)."""

CORRECTED_EXTRAPOLATED = 1.6
"""How many times as much of that is passed on where a sampler extrapolates."""

UNCORRECTED = 2.5
"""How many times as much of an error is passed on where no full step follows. With 0.75 passed on of any, a skipped
last step came out as estimated, and a single one before it 5 to 8 dB better."""

REUSED = 1.5
"""How much more than the newest known pair shows an evaluation that reuses features is taken to cost. It makes up half
a step, but its own error is not seen."""

REUSED_BELOW = 1.25
"""Radians of the noise level above which every evaluation runs: there, reusing features cost up to 26 times what the
pair before showed (docs/lab/deepcache.md)."""

APART = 0.35
"""The least radians of the noise level from one comparison of a run to the next. What an error of the feature does to
the prediction changes slowly with the noise level, and hardly with the distance: from 0.12 to 0.02 over a run of the
trained UNet."""

OWN = 1.0
"""Radians of the noise level from which on a run compares once, whatever earlier ones showed. Images differ little
above and by 3 to 7 dB below; what one comparison shows holds for the rest (correlation 0.7 on the trained DiT, 0.9 on
the UNet)."""

OVERHEAD, OVERHEAD_OF_LONG_RUNS = 0.02, 0.1
"""The most of a run's work that comparisons may take beyond what skipped steps have saved. More may be spent where
it was always recovered on the trained networks: in long runs of samplers without noise of their own."""

LONG_RUN = 16
"""Steps."""


PLAIN = (1.0, 0.0)
"""`Carried.kept` and `beyond` of samplers that add no noise and do not extrapolate."""


@dataclass(frozen=True)
class Carried:
    """How errors of a run's steps reach its final latent, all as factors.

    Errors are those of the denoised prediction, and the latent is scaled so that the image in it has its own size.
    angles: of the steps' noise levels and of the end (`step_schedule.angle`). kept: of the difference between the
    latent and the prediction that a sampler keeps in a step, as a power of the ratio of both noise levels: 1 for
    samplers without noise of their own, 2 for ancestral ones (with eta 1), infinite where each step begins anew from
    the prediction, as LCM's. beyond: how far a sampler follows its predictions beyond the newest one, in units of
    DPM-Solver++ 2M (Lu et al., arXiv 2211.01095): 0 for those that do not. passed_on: the share of an error that later
    steps pass on, where nothing is corrected. factor: by which an error is enlarged beside all that. enlarged_back: how
    many steps back a step that enlarges errors does so: as many as may be skipped at once, since the full steps between
    take back what it adds to earlier ones (on the trained UNet, 8 dB). is_corrected: whether full steps correct what
    those before them got wrong.
    """

    angles: tuple[float, ...]
    kept: float = 1.0
    beyond: float = 0.0
    passed_on: float = 1.0
    factor: float = 1.0
    enlarged_back: int = LONGEST
    is_corrected: bool = False

    def share_kept(self, step: int) -> float:
        """The share of the difference between latent and prediction that the sampler keeps in `step`."""
        start, end = (max(math.tan(at), 0.0) for at in self.angles[step : step + 2])
        ratio = min(end / start, 1.0) if start > 0 else 0.0
        return 0.0 if ratio == 0 or math.isinf(self.kept) else ratio**self.kept

    def at_end(self, step: int) -> float:
        """The factor by which an error in the prediction of `step` reaches the final latent."""
        enlarged = max(1.0, *self._enlarged[step : step + self.enlarged_back + 1])
        return self.factor * (1 - self.share_kept(step)) * self._passed_on(step) * enlarged

    @property
    def at_last(self) -> float:
        """By how much an error is enlarged where no full step follows, since none corrects it."""
        return UNCORRECTED * (self.passed_on if self.is_corrected else 1.0)

    def _passed_on(self, step: int) -> float:
        if not self.is_corrected:
            return PASSED_ON_EXTRAPOLATED if self.beyond else self.passed_on
        passed_on = CORRECTED_EARLY ** (self.angles[step + 1] / (math.pi / 2))
        return passed_on * (CORRECTED_EXTRAPOLATED if self.beyond else 1.0)

    @cached_property
    def _enlarged(self) -> Sequence[float]:
        """By how much each step enlarges errors, its own and those of the steps before it.

        An extrapolating step takes its prediction more than once, and the one before from it. Where steps are equally
        long in the logarithm of the noise level, errors of neighbours cancel what that adds. In a step that is much
        longer than the one before, as many schedules end with, they do not.
        """
        lengths = [
            math.log(math.tan(one) / math.tan(other)) if other > 0 else 0.0 for one, other in pairwise(self.angles)
        ]
        beyond = [0.0, *(self.beyond * now / max(2 * before, 1e-9) for before, now in pairwise(lengths))]
        return [(1 - self.share_kept(step)) * (1 + reach) for step, reach in enumerate(beyond)]


Skipped = tuple[float, float]
"""A skipped step: its distance from the full step before it, in radians, and its `Carried.at_end`."""


@dataclass(frozen=True)
class _Full:
    """distance: to the full step before, in radians. skipped: between the two."""

    step: int
    distance: float
    skipped: Sequence[Skipped]


class QualityRefresh:
    """Skips while the final latent is expected to stay within `target` dB of the uncached run's; for one run.

    The distance is PSNR with the final latent's own range (max - min) as its peak, of the sample of a batch that is
    farthest. Errors within a stretch of skipped steps point the same way and add up; those of different stretches add
    as if they had nothing to do with each other: sums of vectors, which know their directions, are farther from the
    truth, since the model turns them. So short stretches everywhere cost less than a long one.

    A step is skipped where that adds at most the price to the squared error: with one price for all steps no skip could
    be had elsewhere for less. It follows from what the steps left may add.
    """

    uses_drift = False

    def __init__(self, target: float, interval: int):
        self.target = target
        self.sensitivity = Sensitivity()
        """What is known of the model; may be set before the second step."""
        self.lessons: list[tuple[float, float]] = []
        """What this run's comparisons showed: noise level and ratio of each, as `Sensitivity.learn` takes them; all of
        them once it is closed."""
        self.longest = max(interval, LONGEST)
        """The most steps from one full step to the next."""
        self.carried: Carried | None = None
        self.probes = 0
        """Extra passes of the shallow part, to compare; counted by the run."""
        self.estimates: dict[int, float] = {}
        """Step → the final latent's error by estimate if it is skipped, as a share of its range; of each decided on."""
        self._allowed = 10 ** (-target / 20)
        self._skipped: list[Skipped] = []
        """Since the last full step."""
        self._reach = 0.0
        """See `note_reach`."""
        self._full: int | None = None
        """The last full step."""
        self._fulls: list[_Full] = []
        """The full steps from the newest known one on."""
        self._reused = torch.zeros(1, dtype=torch.float64)
        """The error of the final latent [B] by reused features; they add up."""
        self._settled = torch.zeros(1, dtype=torch.float64)
        """The squared error of the final latent [B] by what was skipped before them."""
        self._compared: int | None = None
        """The full step that was compared last."""
        self._comparisons: dict[int, HostCopy] = {}
        """Those not learnt from yet: error of each sample's prediction [B], as a share of the latent's range."""
        self._size: torch.Size | None = None
        """Of the first latent that was compared."""
        self._samples = 0
        """How many the first feature had."""
        self._squares: tuple[float, torch.Tensor] | None = None
        """The newest full step, and the sum over its features of their forecasts' mean squared errors [B]."""
        self._features: dict[float, HostCopy] = {}
        """The same of the full steps before; of second evaluations of a noise level, half a step later."""

    def begin(self, carried: Carried) -> None:
        """Note the run's noise levels and what its sampler does. `enlarged_back` is set here."""
        self.longest = max(self.longest, int((len(carried.angles) - 1) * LONGEST_SHARE))
        angles = tuple(min(at, math.pi / 2) for at in carried.angles)  # a flow may begin above a noise level of 1
        self.carried = replace(carried, angles=angles, enlarged_back=self.longest)

    def should_refresh(self, step: Step, drift: Drift) -> bool:
        if self.carried is None or self._full is None or not 1 <= step.since_refresh < self.longest:
            return True
        known = self._known(step.index)
        if known is None:
            return True
        each, spent = self._error(known), self._spent(known)
        before = self._enlarged(self._skipped, known)
        after = self._enlarged([*self._skipped, self._as_skipped(step.index)], known)
        if step.index == len(self.carried.angles) - 2:
            after *= self.carried.at_last**2
        self.estimates[step.index] = (spent + each * after).max().sqrt().item()
        room = (self._room(spent) / each).min().item()
        # `not <=` instead of `>`: NaN refreshes.
        left = len(self.carried.angles) - 1 - step.index
        return not after - before <= PRICE * (room - before) / max(left, PRICE)

    def may_reuse(self, step: int) -> bool:
        """Whether the second evaluation of a noise level, in full `step`, may reuse the features of the first. Where it
        may, that is counted as done.

        What that costs is taken from the newest step in which both ran, however long ago: pairs come closer to each
        other with less noise. The first, where there is most, says little of the next.
        """
        known, left = self._known(step), len(self.carried.angles) - 1 - step
        pairs = [at for at in self._features if at % 1 and not self._waits(at, step)]
        if known is None or len(pairs) < 2 or left < 3 or self.carried.angles[step] > REUSED_BELOW:
            return False
        self._learn(known.step)
        ratio = self.sensitivity.at(self.carried.angles[int(pairs[-1])])
        if ratio is None:
            return False
        each = self._features[pairs[-1]].read().double().sqrt() * ratio
        after = self._reused + REUSED * self.carried.at_end(step) * each
        price = PRICE / 2 * self._room(self._spent(known)) / left  # of half a step
        may = bool((after**2 - self._reused**2 <= price).all())
        if may:
            self._reused = after
        return may

    def note_reuse(self, step: int, squares: torch.Tensor) -> None:
        """As `note_feature`, of the first evaluation's feature in place of the second's of the same noise level."""
        self.note_feature(step + 0.5, squares)

    def wants_probe(self, step: int, is_free: bool = False) -> bool:
        """Whether `step`, which will be full, is to be run by the skipped path first.

        Not where there is little left to decide, and never with samplers that begin each step anew, whose predictions
        no forecast comes near. Where that path runs none of the model's blocks, `is_free`, every step tells. Else not
        until errors may have become small enough to skip anything: with samplers that add noise, in the second half.
        """
        if self.carried is None or self._full is None or not self._full < step < len(self.carried.angles) - 2:
            return False
        if math.isinf(self.carried.kept):
            return False
        if is_free:
            return True
        if self.carried.kept != 1 and 2 * step < len(self.carried.angles) - 1:
            return False
        angles = self.carried.angles
        if self.sensitivity.is_sure(angles[step]):
            return self._compared is None and angles[step] <= OWN
        return self._compared is None or abs(angles[self._compared] - angles[step]) >= APART

    def overhead(self) -> float:
        """What comparisons may cost beyond what skipped steps have saved, in full steps."""
        steps = len(self.carried.angles) - 1
        is_long = steps >= LONG_RUN and self.carried.kept == 1
        return steps * (OVERHEAD_OF_LONG_RUNS if is_long else OVERHEAD)

    def note_skipped(self, step: int) -> None:
        self._skipped.append(self._as_skipped(step))

    def note_reach(self, step: int, angle: float) -> None:
        """Note that the sampler evaluates `step` at this noise level, where what stands in for the skipped part is of
        the first evaluation of its full step: the farther on others are, the farther from it."""
        if self.carried is None:
            return
        start, end = self.carried.angles[step : step + 2]
        if start != end:
            self._reach = max(self._reach, min((angle - start) / (end - start), 1.0))

    def note_feature(self, step: float, squares: torch.Tensor) -> None:
        """Note the mean squared error that the forecast of one of the features has at full `step`, on the device: of
        each sample [B], or [1] where the feature has no batch dimension. Where their number changes, as that of the
        frames in a context window may, the farthest stands for all."""
        squares = squares.reshape(-1)
        self._samples = self._samples or squares.numel()
        if squares.numel() != self._samples:
            squares = squares.amax(0, keepdim=True)
        if self._squares is not None and self._squares[0] == step:
            squares = squares.to(self._squares[1].device) + self._squares[1]
        else:
            self._send()
        self._squares = step, squares

    def note_full(self, step: int) -> None:
        if self.carried is None:
            return
        if self._full is not None and self._full != step:
            self._fulls.append(_Full(step, self._distance(step), self._skipped))
        self._full, self._skipped = step, []

    def compare(self, step: int, forecast: torch.Tensor, truth: torch.Tensor) -> None:
        """Learn from both predictions [B, ...] of the denoised latent at full `step`, before `note_full`.

        Nothing is learnt at another size than the first, as samplers that call the model at half size have it.
        """
        self._size = self._size or truth.shape
        if truth.shape == self._size:
            flat = truth.flatten(1)
            peak = (flat.amax(1) - flat.amin(1)).float()
            error = (forecast - truth).float().flatten(1).square().mean(1).sqrt()
            self._compared = step
            self._comparisons[step] = HostCopy(error / peak)

    def estimated_db(self) -> float | None:
        """PSNR of the final latent by estimate; None before anything is known, infinite where nothing was skipped."""
        known = self._known(math.inf)
        if known is None:
            return None
        last = self._expected(self._skipped, known) * self.carried.at_last**2
        error = (self._spent(known) + last).max().item()
        return -10 * math.log10(error) if error > 0 else math.inf

    def stop_correcting(self) -> None:
        """Note that full steps from here on correct nothing."""
        if self.carried is not None:
            self.carried = replace(self.carried, is_corrected=False)

    def restart(self) -> None:
        """Note that the sampler went back up: what it skipped since the last full step is not known to matter."""
        self._full = None
        self._skipped = []

    def close(self) -> None:
        self._send()
        self._learn(math.inf)
        self._comparisons.clear()
        self._fulls.clear()
        self._features.clear()

    def _send(self) -> None:
        """Send the newest feature error to the host."""
        if self._squares is not None:
            self._features[self._squares[0]] = HostCopy(self._squares[1])
            self._squares = None

    def _distance(self, step: int, reach: float = 0.0) -> float:
        angles = self.carried.angles
        farthest = angles[step] + reach * (angles[step + 1] - angles[step]) if reach else angles[step]
        return max(abs(farthest - angles[self._full]), 1e-6)

    def _as_skipped(self, step: int) -> Skipped:
        return self._distance(step, self._reach), self.carried.at_end(step)

    def _error(self, full: _Full) -> torch.Tensor:
        """What skipping the full step would have done to its prediction: squares [B]."""
        self._learn(full.step)
        squares = self._features[full.step].read().double()
        ratio = self.sensitivity.at(self.carried.angles[full.step])
        # Where nothing is known, only no error of the feature is none of the prediction. NaN refreshes.
        return torch.where(squares == 0, squares, squares * (math.inf if ratio is None else ratio**2))

    def _learn(self, last: float) -> None:
        """Learn from this run's comparisons up to the step `last`."""
        for step in [step for step in self._comparisons if step <= last and step in self._features]:
            # Of the farthest in each: hosts that join the branches of the guidance have more samples of the feature.
            error, square = (copy.read().double().max() for copy in (self._comparisons.pop(step), self._features[step]))
            ratio = (error / square.sqrt()).item()
            if 0 < ratio < math.inf:
                self.lessons.append((self.carried.angles[step], ratio))
                self.sensitivity.learn(*self.lessons[-1])

    @staticmethod
    def _enlarged(stretch: Sequence[Skipped], known: _Full) -> float:
        """By how much the squared error of the final latent by a stretch of skipped steps exceeds that of `known` in
        its prediction. Errors grow with the distance: as measured on the trained networks."""
        return sum(distance / known.distance * at_end for distance, at_end in stretch) ** 2

    def _expected(self, stretch: Sequence[Skipped], known: _Full) -> torch.Tensor:
        """What a stretch of skipped steps adds to the squared error of the final latent [B]."""
        return self._error(known) * self._enlarged(stretch, known)

    def _spent(self, known: _Full) -> torch.Tensor:
        """The squared error of the final latent [B] by what was skipped before the last full step."""
        while self._fulls[0].step < known.step:
            self._settled = self._settled + self._of_stretch(self._fulls.pop(0), known)
        return sum((self._of_stretch(full, known) for full in self._fulls), self._settled + self._reused**2)

    def _room(self, spent: torch.Tensor) -> torch.Tensor:
        """What the steps left may add to the squared error [B]."""
        return torch.maximum(self._allowed**2 - spent, SUNK * spent)

    def _of_stretch(self, full: _Full, known: _Full) -> torch.Tensor:
        """What was skipped before `full` adds, by its own features where they are known."""
        if not full.skipped:
            return torch.zeros(1, dtype=torch.float64)
        return self._expected(full.skipped, full if full.step <= known.step and self._is_known(full) else known)

    def _is_known(self, full: _Full) -> bool:
        """Without reading anything."""
        can_learn = any(step <= full.step and step in self._features for step in self._comparisons)
        return full.step in self._features and (bool(self.sensitivity) or can_learn)

    def _known(self, step: float) -> _Full | None:
        """The full step to decide `step` by: the newest one, or one before where the device would be waited for."""
        self._send()
        known = [full for full in self._fulls if self._is_known(full)]
        if len(known) > 1 and self._waits(known[-1].step, step):
            return known[-2]
        return known[-1] if known else None

    def _waits(self, at: float, step: float) -> bool:
        """Whether the host would wait for the device to know at `step` what the features `at` another showed."""
        return self._features[at].is_later and int(at) + 1 >= step
