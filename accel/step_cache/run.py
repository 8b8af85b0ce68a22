"""One sampling run with skipped steps: the one place that has its state.

The predictions of neighbouring steps lie nearly on a line. A skipped step calls no model: the sampler is given what the
last full steps foretell.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import torch

from ..core.errors import one_line
from ..core.events import log
from .config import DeepCacheSettings
from .correction import Correction
from .forecast import Evaluation, distance, forecast
from .noise_levels import angle, is_in_order, is_in_window, step_of, stretch_of
from .sampler_facts import SamplerFacts

FULL, SKIPPED = "FS"
"""A step of a run, as a letter."""

LOOK_AHEAD = 2
"""The most steps that a sampler evaluates ahead of its own."""


class DeepCacheRun:
    """Made when the sampler's schedule is known, closed at the end of the run; no tensor outlives it.

    facts: of the sampler on this schedule; without a response nothing is corrected. window: noise levels, highest and
    lowest, of the steps that may be skipped. changes: noise levels in radians at which what is asked of the model
    changes, as where a prompt begins or ends. why_full: why nothing may be skipped.

    Each evaluation is `begin`, then `forecast`, and where that gives nothing `end` with the model's prediction.
    """

    def __init__(
        self,
        settings: DeepCacheSettings,
        facts: SamplerFacts,
        window: Sequence[float],
        changes: Iterable[float] = (),
        why_full: str | None = None,
    ):
        self.settings, self.facts, self.plan = settings, facts, settings.plan()
        self.why_full: str | None = None
        """Why the rest of the run is computed in full, whatever the plan says."""
        self._window, self._changes = window, sorted(changes)
        self._step, self._angle, self._level, self._index = 0, 0.0, 0.0, -1
        """The current evaluation: its step, its noise level as an angle and as it is, its number."""
        self._is_skipped: dict[int, bool] = {}
        """Decisions so far; samplers that look ahead come back to a step."""
        self._is_new = False
        """Whether the current evaluation is the first of its step."""
        self._began: dict[int, float] = {}
        """Steps in the order in which they came, each with its start in seconds of `time.perf_counter`."""
        self._counted: dict[int, bool] = {}
        """Steps that made an evaluation to its end: whether any of it was skipped."""
        self._evaluations: list[bool] = []
        """Whether each evaluation that came to its end was skipped."""
        self._known: list[Evaluation] = []
        """The last two full ones, the newest first, as long as the model is asked the same. Memory: four latents."""
        self._skipped: dict[int, Evaluation] = {}
        """Skipped evaluations since the newest full one, by step."""
        self._situation: Hashable = None
        self._follows = 0.0 if facts.adds_noise else None
        self._correction = None if facts.response is None else Correction(facts.response, facts.adds_noise)
        if why_full is None and not is_in_order(facts.levels):
            why_full = "the noise levels of this run go up and down"
        if why_full is None and facts.steps and facts.levels[0] < facts.levels[-1]:
            why_full = "this run makes noise of an image"
        if why_full is not None:
            self.run_in_full(why_full)
        self.plan.begin(facts)

    def begin(self, level: float, asked: Hashable = None) -> None:
        """The sampler asks for a prediction at this noise level; the first one of a step decides for all. asked: what
        is asked of the model, as by its guidance scale; where that changes, a new line begins."""
        self._index, self._level = self._index + 1, level
        if not self.facts.steps:
            return
        step, self._angle = step_of(level, self.facts.levels), angle(level, self.facts.is_flow)
        if self._is_skipped and step < max(self._is_skipped) - LOOK_AHEAD:  # a restarting sampler
            self._is_skipped.clear()
            self.forget()
            self.plan.begin(self.facts)
        situation = asked, stretch_of(self._angle, self._changes)
        if situation != self._situation:
            self._situation = situation
            self.forget()
        self._step, self._is_new = step, step not in self._is_skipped
        if self._is_new:
            self._began[step] = time.perf_counter()
            self._is_skipped[step] = self._may_skip(step)
            if not self._is_skipped[step]:
                self.plan.note_full(step)

    def _may_skip(self, step: int) -> bool:
        has_line = self.why_full is None and len(self._known) >= 2
        if not has_line or not is_in_window(self.facts.levels[step], self._window):
            return False
        try:
            return self.plan.skips(step)
        except Exception as error:
            self.run_in_full(f"whether to skip a step cannot be judged ({one_line(error)})")
            return False

    @property
    def skips(self) -> bool:
        """Whether the current evaluation is to do without the model."""
        return self._is_skipped.get(self._step, False)

    def keep_full(self) -> None:
        """The current evaluation has called the model after all."""
        self._is_skipped[self._step] = False

    def forecast(self, latent: torch.Tensor) -> torch.Tensor | None:
        """Returns the prediction to give to the sampler for a skipped evaluation of `latent` [B, ...]; None where the
        model is to be called."""
        if not self.skips or not self._fits(latent):
            return None
        try:
            predicted = forecast(self._known, self._angle, self._level, latent, self._follows)
            now = Evaluation(self._index, self._angle, self._level, latent.clone(), predicted.clone())
            correction = self._find_correction(now)
            given = now.prediction if correction is None else correction.correct_skipped(now)
            self._skipped[self._step] = now
        except Exception as error:
            self.run_in_full(f"a skipped step failed ({one_line(error)})", error)
            return None
        self.count(True)
        return predicted if given is now.prediction else given

    @property
    def has_parts(self) -> bool:
        """Whether `forecast_parts` can tell what `end` was given beside predictions."""
        return all(one.parts for one in self._known)

    def forecast_parts(self, latent: torch.Tensor) -> list[torch.Tensor]:
        """Returns the forecasts of the `parts` that `end` was given, for a skipped evaluation of `latent`."""
        lines = []
        for parts in zip(*(one.parts for one in self._known), strict=True):
            lines.append([replace(one, prediction=part) for one, part in zip(self._known, parts, strict=True)])
        return [forecast(points, self._angle, self._level, latent, self._follows) for points in lines]

    def end(self, latent: torch.Tensor, prediction: torch.Tensor, parts: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Returns the prediction to give to the sampler in place of the model's `prediction` [B, ...] for `latent`.
        parts: predictions that it goes by beside this one."""
        self.count(False)
        if self.why_full is not None and self._correction is None or not self.facts.steps:
            return prediction
        # Copies, since some samplers write to their latent and to what they are given.
        copies = [each.clone() for each in (latent, prediction, *parts)]
        now = Evaluation(self._index, self._angle, self._level, copies[0], copies[1], copies[2:])
        try:
            if not self._fits(latent):
                self.forget()
            before = next((one for one in self._known if one.angle != now.angle), None)
            correction = self._find_correction(now)
            given = now.prediction if correction is None else correction.correct_full(now, before)
            if self._skipped and before is not None:
                errors = {step: self._error(one, [now, before]) for step, one in self._skipped.items()}
                self.plan.note_errors(errors)
                self._skipped.clear()
            elif self._is_new and len(self._known) > 1:
                self.plan.note_errors({self._step: self._error(now, self._known)})
        except Exception as error:
            self._correction, given = None, prediction
            self.run_in_full(f"its predictions cannot be compared ({one_line(error)})", error)
        if self._known and self._known[0].angle == now.angle:
            self._known[0] = now  # samplers that evaluate a step again know its latent better
        elif self._is_new:
            self._known = [now, *self._known[:1]]
        return prediction if given is now.prediction else given

    def _error(self, one: Evaluation, points: Sequence[Evaluation]) -> torch.Tensor:
        """How far its prediction is from what it is on the line through `points`."""
        return distance(one.prediction, forecast(points, one.angle, one.level, one.latent, self._follows))

    def forget(self) -> None:
        """Begin a new line: the model is asked something else."""
        self._known.clear()
        self._skipped.clear()

    def _fits(self, latent: torch.Tensor) -> bool:
        return bool(self._known) and self._known[0].latent.shape == latent.shape

    def _find_correction(self, now: Evaluation) -> Correction | None:
        """None from the evaluation on that leaves the response."""
        if self._correction is not None and not self._correction.fits(now):
            self._correction = None
        return self._correction

    def count(self, is_skipped: bool) -> None:
        """Count the current evaluation, which `forecast` and `end` do where they give something."""
        self._evaluations.append(is_skipped)
        self._counted[self._step] = self._counted.get(self._step, False) or is_skipped

    def prediction_in(self, given: torch.Tensor) -> torch.Tensor:
        """See `Correction.prediction_in`."""
        return given if self._correction is None else self._correction.prediction_in(given)

    def stop_correcting(self) -> None:
        """Correct nothing from here on."""
        self._correction = None

    def run_in_full(self, reason: str, error: Exception | None = None) -> None:
        """Skip nothing from now on; the first reason is logged. error: what it came from."""
        if self._index >= 0:
            self._is_skipped[self._step] = False
        if error is not None:
            log.debug("DeepCache: where it failed", exc_info=error)
        if self.why_full is None:
            log.warning("DeepCache: %s; every step runs in full.", reason)
            self.why_full = reason

    # What is told of the run

    @property
    def letters(self) -> str:
        """FULL or SKIPPED for each step, in the order in which they came."""
        return "".join(SKIPPED if self._counted[step] else FULL for step in self._began if step in self._counted)

    @property
    def began(self) -> tuple[float, ...]:
        """The start of each of these steps, in seconds of `time.perf_counter`."""
        return tuple(moment for step, moment in self._began.items() if step in self._counted)

    @property
    def skipped_work(self) -> float:
        """The share of the run's evaluations that were skipped."""
        return sum(self._evaluations) / max(len(self._evaluations), 1)

    def close(self) -> None:
        """Drop all tensors."""
        self.forget()
        self._correction = None
