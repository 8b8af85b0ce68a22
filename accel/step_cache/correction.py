"""What the predictions of a run's last full steps foretell; corrects what skipped steps got wrong, as soon as a full
step shows it.

Predictor and corrector, as in UniPC (Zhao et al., arXiv 2302.04867), without a model call of their own: with the
prediction of a full step, those of the skipped steps before it can be interpolated instead of extrapolated, which is
three to five times as close on the trained networks. What the latent lacks by that is added to the full step's
prediction, as much of it as this sampler needs to reach the latent that it would have reached.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from .features import weights
from .noise_levels import is_near
from .sampler_facts import MEMORY, Response

FOLLOW_RATIO = 0.5
"""How far a prediction follows when the latent is moved, as a share of the move. On the trained networks it is from
about 0 where there is much noise to about 1 where there is little, and differs from image to image."""

MAX_GAIN = 200.0
"""Upper bound of the gain applied to the latent's error when correcting a prediction. A step that uses less of its
prediction leaves that to the next one."""

_INEXACT = 1e-4


@dataclass(frozen=True)
class Evaluation:
    """index: of the run's evaluations. place: its noise level in radians. latent, prediction: [B, ...], the latter of
    the denoised latent, as the model made it or as it was extrapolated. given: what the sampler got; of skipped
    ones."""

    index: int
    place: float
    level: float
    latent: torch.Tensor
    prediction: torch.Tensor
    given: torch.Tensor | None = None


class FullEvaluations:
    """The last two full evaluations, the newest first, as long as the model is asked the same. Memory: four latents,
    most of which the sampler holds as well.

    follows: `FOLLOW_RATIO`, or 0 where the latent is moved by noise.
    """

    def __init__(self, follows: float = FOLLOW_RATIO):
        self._follows = follows
        self.known: list[Evaluation] = []
        self._situation: Hashable = None

    def enter(self, situation: Hashable) -> bool:
        """Forget them if it is another situation; whether it is."""
        is_new, self._situation = situation != self._situation, situation
        if is_new:
            self.known.clear()
        return is_new

    def add(self, now: Evaluation) -> None:
        self.known = [now, *self.known[:1]]

    def error_of(self, now: Evaluation) -> torch.Tensor | None:
        """How far its prediction is from what they foretell: root mean squares as shares of its range [B], on the
        device. None where there are not two."""
        if len(self.known) < 2 or any(one.latent.shape != now.latent.shape for one in self.known):
            return None
        held, moved = mixed(self.known, now)
        off = held + self._follows * (moved - held) - now.prediction
        flat = now.prediction.flatten(1).float()
        peak = (flat.amax(1) - flat.amin(1)).clamp_min(1e-9)
        return off.flatten(1).float().square().mean(1).sqrt() / peak


def mixed(points: Sequence[Evaluation], now: Evaluation) -> tuple[torch.Tensor, torch.Tensor]:
    """The prediction for `now` on the line through those of `points`: as it would be if predictions did not follow the
    latent, and if they followed it all the way."""
    factors = weights([one.place for one in points], now.place)
    held = sum(factor * one.prediction for factor, one in zip(factors, points, strict=True))
    noise = sum(factor / one.level * (one.latent - one.prediction) for factor, one in zip(factors, points, strict=True))
    return held, now.latent - now.level * noise


class Correction:
    """The corrections of one run. Memory: about twelve latents, and three for each step that is skipped in a row.

    A run leaves the response at another level or size.

    full: the run's last full evaluations. follows: of each evaluation, how far a prediction follows the latent where
    what the model returns stays as it is; 1 for models that predict the noise or a flow.
    """

    def __init__(self, response: Response, full: FullEvaluations, follows: Sequence[float]):
        self._response, self._full, self._follows = response, full, follows
        self._skipped: list[Evaluation] = []
        """Since the newest full one."""
        self._errors: dict[int, torch.Tensor] = {}
        """By how much what should have been given exceeds what was: by evaluation, the last `MEMORY`, into which those
        before are folded."""
        self._errors_before: dict[int, torch.Tensor] = {}
        """`_errors` as it was at the newest full one."""
        self._newest: tuple[torch.Tensor, torch.Tensor] | None = None
        """What the sampler was given last, and the prediction in it; None where they are the same."""

    def corrected(self, now: Evaluation, is_skipped: bool, is_new: bool) -> torch.Tensor | None:
        """What the sampler is given in place of the evaluation's prediction, None where the run has left the response;
        to be called before it is added to the full ones. is_new: nothing is interpolated, since what the model is asked
        has changed."""
        self._newest = None
        if not self._fits(now):
            return None
        if is_new:
            self._skipped.clear()
        if is_skipped:
            prediction = self._extrapolated(now)
            given = self._balanced(now.index, prediction)
            self._skipped.append(replace(now, prediction=prediction, given=given))
            return given
        if self._full.known and self._skipped:
            self._look_back([now, self._full.known[0]])
        self._skipped.clear()
        given = self._balanced(now.index, now.prediction + FOLLOW_RATIO * self._deviation(now.index))
        self._errors_before = self._errors
        return given

    def prediction_in(self, given: torch.Tensor) -> torch.Tensor:
        """The prediction in what the sampler was `given` for its newest evaluation, without what the latent lacked, for
        previews; `given` itself where it is anything else, or where it becomes the latent."""
        return self._newest[1] if self._newest is not None and given is self._newest[0] else given

    def _fits(self, now: Evaluation) -> bool:
        levels = self._response.levels
        if now.index >= len(levels) or not is_near(levels[now.index], now.level):
            return False
        return all(
            one.shape == now.prediction.shape for one in (now.latent, *(full.latent for full in self._full.known))
        )

    def _extrapolated(self, now: Evaluation) -> torch.Tensor:
        """The prediction of a skipped evaluation, as far as it should follow the latent."""
        if not self._full.known:
            return now.prediction
        held, moved = mixed(self._full.known, now)
        # What the skipped path makes follows it as what the model returns does; right where there is little noise.
        too_far = self._follows[now.index] - FOLLOW_RATIO
        return now.prediction + too_far * math.tan(min(now.place, math.pi / 4)) * (held - moved)

    def _look_back(self, points: Sequence[Evaluation]) -> None:
        """Note what the skipped evaluations between two full ones should have given."""
        self._errors = self._errors_before
        for one in self._skipped:
            held, moved = mixed(points, replace(one, latent=one.latent + self._deviation(one.index)))
            self._note(one.index, held + FOLLOW_RATIO * (moved - held) - one.given)

    def _balanced(self, index: int, prediction: torch.Tensor) -> torch.Tensor:
        """`prediction` with what it takes for the next latent to be what it should be; noted."""
        effect = self._response.effects[index + 1][index]
        missing = self._deviation(index + 1)
        if isinstance(missing, torch.Tensor) and abs(effect) * MAX_GAIN > 1:
            given = prediction + missing / effect
            if abs(effect - 1) > _INEXACT:
                self._newest = given, prediction
            self._note(index, prediction - given)
            return given
        if self._errors:
            self._note(index, torch.zeros_like(prediction))
        return prediction

    def _deviation(self, index: int) -> torch.Tensor | float:
        """By how much the latent of evaluation `index` should be larger."""
        effects = self._response.effects[index]
        return sum((off * effects[one] for one, off in self._errors.items() if effects[one]), 0.0)

    def _note(self, index: int, off: torch.Tensor) -> None:
        self._errors = {**self._errors, index: off}
        oldest = self._errors.pop(index - MEMORY, None)
        if oldest is not None:
            for place, factor in enumerate(self._response.folds[index], index - MEMORY + 1):
                if factor:
                    self._errors[place] = self._errors.get(place, 0.0) + factor * oldest
