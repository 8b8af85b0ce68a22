"""Corrects what skipped steps got wrong, as soon as a full step shows it.

Predictor and corrector, as in UniPC (Zhao et al., arXiv 2302.04867), without a model call of their own: with the
prediction of a full step, those of the skipped steps before it can be interpolated instead of extrapolated, which is
three to five times as close on the trained networks. What the latent lacks by that is added to the full step's
prediction, as much of it as this sampler needs to reach the latent that it would have reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..step_schedule import is_near, stretch_of
from .forecast import reachable, weights

FOLLOWS = 0.5
"""How far a prediction follows when the latent is moved, as a share of the move. On the trained networks it is from
about 0 where there is much noise to about 1 where there is little, and differs from image to image."""

GAIN = 0.7
"""How much of what was wrong is corrected. All of it brings most images closer still, and some farther, which take
errors back by themselves."""

MEMORY = 4
"""The most predictions that a sampler's step depends on beside the latent."""

LARGEST_FACTOR = 200.0
"""The most by which what the latent lacks is multiplied for a prediction to make up for it. A step that uses less of
its prediction leaves that to the next one."""

_INEXACT = 1e-4


@dataclass(frozen=True)
class Response:
    """How a sampler's predictions reach its later latents.

    levels: noise levels of its evaluations. effects: [evaluations + 1, evaluations], by how much the latent of each
    evaluation, and the final one, moves when the prediction of an earlier one does. folds: for each evaluation, what
    stands for the prediction `MEMORY` before it from then on, in terms of those since.
    """

    levels: tuple[float, ...]
    effects: list[list[float]]
    folds: list[list[float]]


Predict = Callable[[torch.Tensor, float], torch.Tensor]
"""Gives a prediction for a latent [B, ...] at a noise level."""


class _LeavesSchedule(Exception):
    """A sampler evaluates more than once in a step, or at levels of its own."""


def response_of(schedule: Sequence[float], sample: Callable[[Predict, torch.Tensor], torch.Tensor]) -> Response | None:
    """The response of a sampler, by running it on impulses; None unless it is linear and evaluates each step once.

    Others, as Heun's, also evaluate latents that the run does not pass through. Corrected by these, the trained UNet's
    images came out 3 dB farther.

    schedule: noise levels of its steps, and the last one. sample: runs the sampler with the given predictions, from the
    given latent [B, 1, 1, 1] to the final one, without noise.
    """
    count = len(schedule) - 1
    anything = torch.rand(count, generator=torch.Generator().manual_seed(0))
    latents = []

    def predict(latent: torch.Tensor, level: float) -> torch.Tensor:
        place = len(latents)
        if place == count or not is_near(schedule[place], level):
            raise _LeavesSchedule
        latents.append(latent.detach().reshape(-1).clone())
        prediction = torch.zeros_like(latent)
        prediction[0], prediction[place + 1] = anything[place], 1.0
        return prediction

    try:
        final = sample(predict, torch.zeros(count + 1, 1, 1, 1))
    except _LeavesSchedule:
        return None
    levels = tuple(schedule[:count])
    if len(latents) != count or any(one <= other for one, other in pairwise([*levels, 0.0])):
        return None
    moved = torch.stack([*latents, final.reshape(-1)]).double()
    effects = moved[:, 1:]
    if not torch.allclose(moved[:, 0], effects @ anything.double(), rtol=_INEXACT, atol=_INEXACT):
        return None
    folds = []
    for evaluation in range(count):
        first = evaluation - MEMORY
        if first < 0:
            folds.append([])
            continue
        later = effects[evaluation + 1 :]
        oldest, since = later[:, first : first + 1], later[:, first + 1 : evaluation + 1]
        fold = torch.linalg.lstsq(since, oldest, rcond=1e-5, driver="gelsd").solution
        if (since @ fold - oldest).norm() > _INEXACT * (oldest.norm() + 1e-9):
            return None
        folds.append(fold.flatten().tolist())
    return Response(levels, effects.tolist(), folds)


@dataclass(frozen=True)
class _Evaluation:
    """index: in the response. place: its noise level in radians. latent, prediction: [B, ...], the latter as the model
    made it or as it was extrapolated. given: what the sampler got; of skipped ones."""

    index: int
    place: float
    level: float
    latent: torch.Tensor
    prediction: torch.Tensor
    given: torch.Tensor | None = None


class Correction:
    """Of one run. Memory: about twelve latents, and three for each step that is skipped in a row.

    Where the run leaves the response, as at another level or size, predictions stay as they are from there on.

    changes: noise levels in radians at which what is asked of the model changes, as where a prompt begins or ends.
    """

    def __init__(self, response: Response, changes: Iterable[float] = ()):
        self._response = response
        self._changes = sorted(changes)
        self._index = -1
        self._full: list[_Evaluation] = []
        """The last two full ones, the newest first."""
        self._skipped: list[_Evaluation] = []
        """Since the newest full one."""
        self._situation: Hashable = None
        self._off: dict[int, torch.Tensor] = {}
        """By how much what should have been given exceeds what was: by evaluation, the last `MEMORY`, into which those
        before are folded."""
        self._off_before: dict[int, torch.Tensor] = {}
        """The same at the newest full one."""
        self._newest: tuple[torch.Tensor, torch.Tensor] | None = None
        """What the sampler was given last, and the prediction in it; None where they are the same."""
        self.is_over = False
        """Whether the run has left the response."""

    def corrected(
        self,
        latent: torch.Tensor,
        level: float,
        place: float,
        prediction: torch.Tensor,
        is_skipped: bool,
        scale: Hashable = None,
    ) -> torch.Tensor:
        """What the sampler is given in place of `prediction` [B, ...], both of the denoised latent.

        latent: what the evaluation is of. level: its noise level, as the sampler has it. place: the same in radians
        (`step_schedule.angle`). scale: of the guidance. Nothing is interpolated across a change of that, or of what is
        asked.
        """
        self._index += 1
        self._newest = None
        if self.is_over or not self._fits(latent, level, prediction):
            self.is_over = True
            return prediction
        situation = scale, stretch_of(place, self._changes)
        if situation != self._situation:
            self._situation = situation
            self._full.clear()
            self._skipped.clear()
        now = _Evaluation(self._index, place, level, latent, prediction)
        if is_skipped:
            prediction = self._extrapolated(now)
            given = self._balanced(now.index, prediction)
            self._skipped.append(replace(now, prediction=prediction, given=given))
            return given
        if self._full and self._skipped:
            self._look_back([now, self._full[0]])
        self._full = [now, *self._full[:1]]
        self._skipped.clear()
        given = self._balanced(now.index, prediction + FOLLOWS * self._deviation(now.index))
        self._off_before = self._off
        return given

    def prediction_in(self, given: torch.Tensor) -> torch.Tensor:
        """The prediction in what the sampler was `given` for its newest evaluation, without what the latent lacked, for
        previews; `given` itself where it is anything else, or where it becomes the latent."""
        return self._newest[1] if self._newest is not None and given is self._newest[0] else given

    def _fits(self, latent: torch.Tensor, level: float, prediction: torch.Tensor) -> bool:
        levels = self._response.levels
        if self._index >= len(levels) or not is_near(levels[self._index], level):
            return False
        return all(one.shape == prediction.shape for one in (latent, *(full.latent for full in self._full)))

    def _extrapolated(self, now: _Evaluation) -> torch.Tensor:
        """The prediction of a skipped evaluation, as far as it should follow the latent."""
        if not self._full:
            return now.prediction
        places = [one.place for one in self._full]
        factors = weights(places, reachable(places, now.place)) if len(places) > 1 else [1.0]
        held, moved = _mixed(self._full, factors, now.latent, now.level)
        # What the skipped path makes follows it all the way, as is right where there is little noise.
        return now.prediction + (1 - FOLLOWS) * math.tan(min(now.place, math.pi / 4)) * (held - moved)

    def _look_back(self, points: Sequence[_Evaluation]) -> None:
        """Note what the skipped evaluations between two full ones should have given."""
        places = [one.place for one in points]
        self._off = self._off_before
        for one in self._skipped:
            latent = one.latent + self._deviation(one.index)
            held, moved = _mixed(points, weights(places, one.place), latent, one.level)
            lacking = held + FOLLOWS * (moved - held) - one.prediction
            self._note(one.index, GAIN * lacking + one.prediction - one.given)

    def _balanced(self, index: int, prediction: torch.Tensor) -> torch.Tensor:
        """`prediction` with what it takes for the next latent to be what it should be; noted."""
        effect = self._response.effects[index + 1][index]
        missing = self._deviation(index + 1)
        if isinstance(missing, torch.Tensor) and abs(effect) * LARGEST_FACTOR > 1:
            given = prediction + missing / effect
            if abs(effect - 1) > _INEXACT:
                self._newest = given, prediction
            self._note(index, prediction - given)
            return given
        if self._off:
            self._note(index, torch.zeros_like(prediction))
        return prediction

    def _deviation(self, index: int) -> torch.Tensor | float:
        """By how much the latent of evaluation `index` should be larger."""
        effects = self._response.effects[index]
        return sum((off * effects[one] for one, off in self._off.items() if effects[one]), 0.0)

    def _note(self, index: int, off: torch.Tensor) -> None:
        self._off = {**self._off, index: off}
        oldest = self._off.pop(index - MEMORY, None)
        if oldest is not None:
            for place, factor in enumerate(self._response.folds[index], index - MEMORY + 1):
                if factor:
                    self._off[place] = self._off.get(place, 0.0) + factor * oldest


def _mixed(
    points: Sequence[_Evaluation], factors: Sequence[float], latent: torch.Tensor, level: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prediction for `latent` at `level` on the line through those of `points`: as it would be if predictions did
    not follow the latent, and if they followed it all the way."""
    held = sum(factor * one.prediction for factor, one in zip(factors, points, strict=True))
    noise = sum(factor / one.level * (one.latent - one.prediction) for factor, one in zip(factors, points, strict=True))
    return held, latent - level * noise
