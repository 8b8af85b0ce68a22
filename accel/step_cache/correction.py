"""Corrects what skipped steps got wrong, as soon as a full step shows it.

Predictor and corrector, as in UniPC (Zhao et al., arXiv 2302.04867), without a model call of their own: with the
prediction of a full step, those of the skipped steps before it can be interpolated instead of extrapolated, which is
three to five times as close on the trained networks. What the latent lacks by that is added to the full step's
prediction, as much of it as this sampler needs to reach the latent that it would have reached.
"""

from __future__ import annotations

import torch

from .forecast import Evaluation, forecast
from .noise_levels import is_near
from .sampler_facts import MEMORY, Response

FOLLOW_RATIO = 0.5
"""How far a prediction follows when the latent is corrected, as a share of the move. On the trained networks it is from
about 0 where there is much noise to about 1 where there is little, and differs from image to image."""

MAX_GAIN = 200.0
"""Upper bound of the gain applied to the latent's error when correcting a prediction. A step that uses less of its
prediction leaves that to the next one."""

_INEXACT = 1e-4


class Correction:
    """The corrections of one run. Memory: about twelve latents, and three for each step that is skipped in a row."""

    def __init__(self, response: Response, adds_noise: bool):
        """adds_noise: whether the sampler does: predictions of skipped steps do not follow the latent then."""
        self._response = response
        self._follows = 0.0 if adds_noise else FOLLOW_RATIO
        self._skipped: list[tuple[Evaluation, torch.Tensor]] = []
        """Skipped evaluations since the newest full one, each with the prediction that the sampler was given."""
        self._errors: dict[int, torch.Tensor] = {}
        """By how much what should have been given exceeds what was: by evaluation, the last `MEMORY`, into which those
        before are folded."""
        self._errors_before: dict[int, torch.Tensor] = {}
        """`_errors` as it was at the newest full one."""
        self._newest: tuple[torch.Tensor, torch.Tensor] | None = None
        """What the sampler was given last, and the prediction in it; None where they are the same."""

    def fits(self, now: Evaluation) -> bool:
        """Whether the evaluation is the one of the response."""
        levels = self._response.levels
        return now.index < len(levels) and is_near(levels[now.index], now.level)

    def correct_skipped(self, now: Evaluation) -> torch.Tensor:
        """Returns the prediction to give to the sampler for a skipped evaluation: its forecast, corrected."""
        given = self._balance(now.index, now.prediction)
        self._skipped.append((now, given.clone()))  # some samplers write to it
        return given

    def correct_full(self, now: Evaluation, before: Evaluation | None) -> torch.Tensor:
        """Returns the prediction to give to the sampler for a full evaluation, corrected. before: the full one before;
        None where the model is asked something else since."""
        if before is not None and self._skipped:
            self._errors = self._errors_before
            for one, made in self._skipped:  # what they should have given
                latent = one.latent + self._deviation(one.index)
                should = forecast([now, before], one.angle, one.level, latent, self._follows)
                self._note(one.index, should - made)
        self._skipped.clear()
        if not self._errors:
            return now.prediction
        given = self._balance(now.index, now.prediction + FOLLOW_RATIO * self._deviation(now.index))
        self._errors_before = self._errors
        return given

    def prediction_in(self, given: torch.Tensor) -> torch.Tensor:
        """The prediction in what the sampler was `given` for its newest evaluation, without what the latent lacked, for
        previews; `given` itself where it is anything else, or where it becomes the latent."""
        return self._newest[1] if self._newest is not None and given is self._newest[0] else given

    def _balance(self, index: int, prediction: torch.Tensor) -> torch.Tensor:
        """`prediction` with what it takes for the next latent to be what it should be; noted."""
        effect, self._newest = self._response.effects[index + 1][index], None
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
            for later, factor in enumerate(self._response.folds[index], index - MEMORY + 1):
                if factor:
                    self._errors[later] = self._errors.get(later, 0.0) + factor * oldest
