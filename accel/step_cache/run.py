"""One sampling run with skipped steps: the one place that has its state.

Neighbouring sampler steps have nearly equal deep features (Ma, Fang, Wang: "DeepCache", CVPR 2024,
arXiv 2312.00858). A full step stores what the model's blocks give; a skipped step runs none of them, as in TaylorSeer
(Liu et al., arXiv 2503.06923) and AdaptiveDiffusion (Ye et al., arXiv 2410.09873).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ..core.errors import one_line
from ..core.events import log
from ..core.sentences import NOISE_UNSEEN
from .config import DeepCacheSettings
from .correction import FOLLOW_RATIO, Correction, Evaluation, FullEvaluations
from .features import Features
from .noise_levels import angle, in_window, is_in_order, step_of, stretch_of
from .sampler_facts import SamplerFacts

FULL, SKIPPED = "FS"
"""A step of a run, as a letter."""

LOOK_AHEAD = 2
"""The most steps that a sampler evaluates ahead of its own."""


class DeepCacheRun:
    """Made when the sampler's schedule is known, closed at the end of the run; no tensor outlives it.

    facts: of the sampler on this schedule. find: gives a model's split, or None. window: noise levels, highest and
    lowest, of the steps that may be skipped. follows: for each step, how far a prediction follows the latent where what
    the model returns stays as it is (`Correction`); None where nothing may be corrected. changes: noise levels in
    radians at which what is asked of the model changes, as where a prompt begins or ends. why_full: why nothing may be
    skipped.
    """

    def __init__(
        self,
        settings: DeepCacheSettings,
        facts: SamplerFacts,
        find: Callable[[torch.nn.Module], Any],
        window: tuple[float, float],
        follows: tuple[float, ...] | None = None,
        changes: Iterable[float] = (),
        why_full: str | None = None,
    ):
        self.settings, self.plan = settings, settings.plan()
        can_correct = follows is not None and self.plan.points > 1
        self.facts = facts = facts if can_correct else replace(facts, response=None)
        self.why_full: str | None = None
        """Why the rest of the run is computed in full, whatever the plan says."""
        self.step, self.angle = 0, 0.0
        """The current evaluation: its step, its noise level as an angle."""
        self.is_full: bool | None = None
        """Whether the current evaluation is full, or skipped; None: nothing is stored and nothing skipped."""
        self.last_full = -1
        """The last full step."""
        self._find, self._window, self._changes = find, window, sorted(changes)
        self._models: dict[torch.nn.Module, Features | None] = {}
        self._is_skipped: dict[int, bool] = {}
        """Decisions so far; samplers that look ahead come back to a step."""
        self._began: dict[int, float] = {}
        """Steps in the order in which they came, each with its start in seconds of `time.perf_counter`."""
        self._counted: dict[int, bool] = {}
        """Steps that made a call to its end: not the one that failed, nor what another cache took; whether any call of
        it was skipped."""
        self._calls: list[bool] = []
        """Which calls of the current evaluation were skipped."""
        self._evaluations = -1
        self._is_new = False
        """Whether the current evaluation is the first of its step."""
        self._full = FullEvaluations(0.0 if facts.adds_noise else FOLLOW_RATIO)
        self._correction = None if facts.response is None else Correction(facts.response, self._full, follows)
        self._lock = threading.Lock()
        if why_full is None and not is_in_order(facts.levels):
            why_full = "the noise levels of this run go up and down"
        if why_full is None and facts.steps and facts.levels[0] < facts.levels[-1]:
            why_full = "this run makes noise of an image"
        if why_full is not None:
            self.run_in_full(why_full)
        self.plan.begin(facts)

    # Evaluations

    def begin(self, level: float) -> None:
        """Note that the sampler asks for a prediction at this noise level; the first one of a step decides for all."""
        self._calls.clear()
        for features in self._features:
            features.begin_evaluation()
        self._evaluations += 1
        if not self.facts.steps:
            return
        step, self.angle = step_of(level, self.facts.levels), angle(level, self.facts.is_flow)
        if step < self.last_full - LOOK_AHEAD:
            self._go_back()  # a restarting sampler: the features are from the future
        self._is_new = step not in self._is_skipped
        if self._is_new:
            self._began[step] = time.perf_counter()
            self._is_skipped[step] = self._may_skip(step)
            if not self._is_skipped[step]:
                self.plan.note_full(step)
        is_other, self.step = step != self.step or self._is_new, step
        self.is_full = not self._is_skipped[step]
        if is_other and self.is_full:
            for features in self._features:
                features.start_cycle(step if self.last_full < 0 else min(self.last_full, step))
            self.last_full = step

    def end(self, latent: torch.Tensor, level: float, prediction: torch.Tensor, scale: Hashable = None) -> torch.Tensor:
        """What the sampler is given in place of the `prediction` [B, ...] of the evaluation that is over.

        latent: what it is of. level: its noise level, as the sampler has it. scale: of the guidance.
        """
        if self.is_full is None or self.why_full is not None and self._correction is None:
            return prediction
        if len(set(self._calls)) != 1:
            # Another cache answered, or only some calls were skipped: what is true is no longer known.
            self._correction = None
            self._full.known.clear()
            return prediction
        try:
            return self._ended(latent, level, prediction, scale)
        except Exception as error:
            self._correction = None
            self.run_in_full(f"its predictions cannot be compared ({one_line(error)})")
            return prediction

    def _ended(self, latent: torch.Tensor, level: float, prediction: torch.Tensor, scale: Hashable) -> torch.Tensor:
        now = Evaluation(self._evaluations, self.angle, level, latent, prediction)
        is_other = self._full.enter((scale, stretch_of(self.angle, self._changes)))
        given, is_full = prediction, not self._calls[0]
        if self._is_new and is_full and (error := self._full.error_of(now)) is not None:
            self.plan.note_shown(self.step, error)
        if self._correction is not None:
            given = self._correction.corrected(now, not is_full, is_other)
            if given is None:
                given, self._correction = prediction, None
        if self._is_new and is_full:
            self._full.add(now)
        return given

    def prediction_in(self, given: torch.Tensor) -> torch.Tensor:
        """See `Correction.prediction_in`."""
        return given if self._correction is None else self._correction.prediction_in(given)

    def stop_correcting(self) -> None:
        """Correct nothing from here on."""
        self._correction = None

    def _may_skip(self, step: int) -> bool:
        if self.why_full is not None or self.last_full < 0 or self.settings.is_off:
            return False
        if not in_window(self.facts.levels[step], self._window):
            return False
        try:
            return self.plan.skips(step)
        except Exception as error:
            self.run_in_full(f"whether to skip a step cannot be judged ({one_line(error)})")
            return False

    @property
    def _features(self) -> list[Features]:
        """Of all models that have a split."""
        return list(filter(None, list(self._models.values())))

    def _forget(self) -> None:
        for features in self._features:
            features.forget()

    def _go_back(self) -> None:
        self._forget()
        self._is_skipped.clear()
        self._full.known.clear()
        self.last_full = -1
        self.plan.begin(self.facts)

    # What a model asks

    def of(self, model: torch.nn.Module) -> Features | None:
        """The features of this model; None for one that has no split, or is of another class than the first one.

        A host may call clones of a model on several devices at once, from a thread for each: steps are full or skipped
        for all alike.
        """
        with self._lock:
            if model not in self._models:
                first = next(iter(self._models), model)
                split = self._find(model) if type(first) is type(model) else None
                self._models[model] = None if split is None else Features(self, split)
                if split is not None and self.facts.adds_noise and not split.sees_noise:
                    self.run_in_full(NOISE_UNSEEN)
            return self._models[model]

    @property
    def caches(self) -> bool:
        """Whether the calls of the current evaluation store or take features."""
        return self.why_full is None and self.is_full is not None

    @property
    def leaves_controls_out(self) -> bool:
        """Whether the current evaluation's calls, as far as they can be skipped, read nothing that ControlNets give."""
        return self.caches and not self.is_full and not any(one.split.takes_control for one in self._features)

    def count(self, skipped: bool) -> None:
        """Count a finished model call; a step with one skipped call is a skipped step."""
        self._calls.append(skipped)
        if self.is_full is not None:
            self._counted[self.step] = self._counted.get(self.step, False) or skipped

    def run_in_full(self, reason: str, error: Exception | None = None) -> None:
        """Drop all features and skip nothing from now on; the first reason is logged. error: what it came from."""
        self._forget()
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
    def skipped_steps(self) -> int:
        return sum(self._counted.values())

    @property
    def full_steps(self) -> int:
        return len(self._counted) - self.skipped_steps

    @property
    def bytes(self) -> int:
        """The size of all features that are kept."""
        return sum(features.bytes for features in self._features)

    @property
    def skipped_work(self) -> float:
        """The share of the run's work that was left out, by estimate."""
        share = next((features.split.shallow_share for features in self._features), 0.0)
        return self.skipped_steps * (1 - share) / max(len(self._counted), 1)

    def close(self) -> None:
        """Drop all tensors and the models."""
        self._forget()
        self._models.clear()
        self._full.known.clear()
        self._correction = None
        self.is_full = None
