"""The state of one sampling run under DeepCache: which steps are full, and the features of every CFG branch.

Neighbouring sampler steps have nearly equal deep features (Ma, Fang, Wang: "DeepCache", CVPR 2024,
arXiv 2312.00858). A full step stores the feature that the deep part of the model hands to the shallow part; a skipped
step runs the shallow part alone. Unless the settings or the sampler's noise ask for one, there is none: all blocks are
deep, as in TaylorSeer (Liu et al., arXiv 2503.06923) and AdaptiveDiffusion (Ye et al., arXiv 2410.09873).
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.errors import one_line
from ..core.events import log
from .config import DeepCacheSettings
from .policies.drift import Drift
from .policies.quality import PASSED_ON, PLAIN, Carried, QualityRefresh
from .policies.sensitivity import Learnt, key_of
from .predictions.correction import Correction
from .predictions.forecast import ORDER, History
from .predictions.guidance import Guidance
from .refresh import Step
from .step_schedule import angle, in_window, is_in_order, is_near, step_of

FULL, HALF, SKIPPED = "FHS"
"""A step of a run, as a letter. HALF: the second of its two evaluations reused the features of the first."""

COMPARED = "C"
"""In `DeepCacheRun.plan`, a full step that was also run as a skipped one, to compare."""

LATENT_DRIFT = 1.25
"""What the drift of the latent counts beside that of shallow features: with that, skipping all blocks at a threshold
leaves the trained networks' images as close as skipping most of them, with a tenth to a third less work."""

LOOK_AHEAD = 2
"""The most steps that a sampler evaluates ahead of its own."""


_SHARED = ("schedule", "window", "is_flow", "guidance", "_step", "_angle", "_refresh", "_full")
"""What a run has in common with its siblings (`DeepCacheRun.of`)."""


class OutdatedFeature(Exception):
    """A stored feature does not fit this call, as when Kohya's Deep Shrink ends; a full call renews it."""


@dataclass(frozen=True)
class BranchKey:
    """What tells one CFG branch of a run, a sequence of model inputs, from every other.

    uuid and cond_index: the conditioning and the list that it is in (an area's copy in the negative list may have the
    uuid of the positive one). variant: the rest that tells calls apart, such as the frame indices of a context window
    or the blocks that a patch replaces. occurrence: how many equal ones came before it within one evaluation. shape:
    one chunk of the latent, [B, C, ...].
    """

    uuid: Hashable
    cond_index: int
    variant: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    occurrence: int


class DeepCacheRun:
    """Made at the start of a run, closed at its end; no tensor outlives it.

    A step is full or skipped for all branches alike. A branch without a feature from the last full step (new in
    mid-run, or left out there by another cache) is computed in full.

    Memory for each branch (two with cond and uncond) and part of the split: one copy of the deep feature, with
    "forecast" `forecast.ORDER` + 1; one of the shallow feature where the policy uses drift. SD1.5 at 1024² in half
    precision and default depth: 10 MiB for each copy and image.
    """

    def __init__(self, settings: DeepCacheSettings):
        self.settings = settings
        self.policy = settings.policy()
        self.target = self.policy if isinstance(self.policy, QualityRefresh) else None
        """The quality target, where there is one."""
        self.carries: tuple[float, float] | None = PLAIN
        """The sampler's `kept` and `beyond`, as `policies.quality.Carried` has them; None where they are not known. Set
        by the host."""
        self.adds_noise = True
        """Whether the sampler adds noise in a step, or may; set by the host."""
        self.correction: Correction | None = None
        """Corrects what the sampler is given; set by the host."""
        self.sampler: Any = None
        """The host's, where it may be corrected; set by the host."""
        self.learnt: Learnt | None = None
        """What earlier runs with a quality learnt; set by the host, None for nothing."""
        self.guided_by = ""
        """What else decides how errors reach the prediction, as the scale of the guidance; set by the host."""
        self._key: str | None = None
        """Of what this run learns, where it does."""
        self.has_other_nodes = False
        """Whether more than the model takes part in each evaluation, as hooks; set by the host."""
        self.has_controls = False
        """Whether ControlNets do where `leaves_controls_out` is not true; set by the host."""
        self.models = 1
        """How many models make a prediction, each with a run of its own; set by the host."""
        self.guidance: Guidance | None = None
        """Set by the host where skipped steps leave out the prediction without the prompt, and nothing else."""
        self.is_probing = False
        """Whether the current step, which is full, is being run by the skipped path for comparison."""
        self._broken = 0
        """Inconclusive probes: calls of theirs ran in full, or another cache answered those of their step."""
        self._compared: set[int] = set()
        """The steps that it was so for."""
        self._calls: list[bool] = []
        """Which calls of the current evaluation were skipped."""
        self.split: Any = None
        """The split of the run's model; set by the host, dropped at the end."""
        self.levels: Any = None
        """How the host reads noise levels; set by the host."""
        self.schedule: tuple[float, ...] = ()
        """Noise levels of the run, one more than it has steps; empty until its first evaluation."""
        self.window: tuple[float, float] = (math.inf, 0.0)
        """Noise levels, highest and lowest, of the steps that may be skipped."""
        self.is_flow = False
        """Whether noise levels are shares of noise, 0 to 1, instead of its ratio to the image."""
        self.failed = False
        """Whether the rest of the run is computed in full, whatever the policy says."""
        self.why_full: str | None = None
        """Why, where the model, the sampler or a failure is the reason."""
        self._step: int | None = None
        self._angle = 0.0
        """Of the current evaluation's noise level."""
        self._refresh: int | None = None
        """The last full step."""
        self._full: dict[int, bool] = {}
        """Decisions so far; samplers that look ahead come back to a step."""
        self._histories: dict[tuple[BranchKey, Hashable], History] = {}
        self._parts: set[Hashable] = set()
        self._drift = Drift()
        self._occurrences: Counter[BranchKey] = Counter()
        self._skipped: dict[int, bool] = {}
        self._evaluations = 0
        self._level = math.inf
        """Of the current evaluation, as the sampler has it."""
        self._is_second = False
        """Whether it is the second of a noise level that could reuse the features of the first, as where a step of
        Heun's begins: the latent has only been moved by what the end of the step before corrected."""
        self._reuses = False
        """Whether it reuses the features of the first, in a full step."""
        self._halves: set[int] = set()
        """The steps in which one did."""
        self._began: list[tuple[int, float]] = []
        """Steps in the order in which they came, each with its start in seconds of `time.perf_counter`."""
        self._siblings: dict[torch.nn.Module, DeepCacheRun] = {}
        self._lock = threading.Lock()

    def of(self, model: torch.nn.Module, find: Callable[[torch.nn.Module], Any]) -> DeepCacheRun | None:
        """The run of this model: this one for the first that is asked about, siblings for others of its class.

        A host may call clones of a model on several devices at once, from a thread for each. A sibling has features of
        its own; steps are full or skipped for all alike. None for a model that has no split.

        find: gives a model's split, or None.
        """
        with self._lock:
            if self.split is None:
                self.split = find(model)
            if self.split is None or type(self.split.model) is not type(model):
                return None
            if self.split.model is model:
                return self
            if model not in self._siblings:
                made = self._siblings[model] = DeepCacheRun(self.settings)
                for name in _SHARED:
                    setattr(made, name, getattr(self, name))
                made.target = None  # this run decides, by its own features
                made.split = find(model)
            made = self._siblings[model]
            return None if made.split is None else made

    def set_schedule(self, levels: Sequence[float]) -> None:
        """Set the run's noise levels. Where they go up and down, every step runs in full."""
        self.schedule = tuple(levels)
        if not is_in_order(self.schedule):
            self.run_in_full("the noise levels of this run go up and down")
        elif self.target is not None and self.schedule and self.schedule[0] < self.schedule[-1]:
            self.run_in_full("a quality is that of an image, and this run makes noise of one")
        elif self.target is not None and self.carries is not None:
            # An error of the guidance is as lasting as the prompt. Other models are taken to add as much as this one.
            passed_on = PASSED_ON if self.guidance is None else 1.0
            angles = tuple(angle(level, self.is_flow) for level in self.schedule)
            factor, is_corrected = math.sqrt(self.models), self.correction is not None
            self.target.begin(
                Carried(angles, *self.carries, passed_on=passed_on, factor=factor, is_corrected=is_corrected)
            )

    @property
    def may_correct(self) -> bool:
        """Whether skipped steps extrapolate the only model as a whole, and no noise is added."""
        is_whole = not self.settings.depth and self.models == 1
        return is_whole and not self.adds_noise and self.settings.between == "forecast"

    def corrected(self, latent: torch.Tensor, level: float, prediction: torch.Tensor, scale: Hashable) -> torch.Tensor:
        """What the sampler is given in place of `prediction` [B, ...], of the evaluation that is over.

        latent, level, scale: as for `Correction.corrected`.
        """
        if self.correction is None:
            return prediction
        calls = {skipped for run in (self, *self._siblings.values()) for skipped in run._calls}
        if len(calls) != 1:
            # Another cache answered, or only some calls were skipped: what is true is no longer known.
            self.stop_correcting()
            return prediction
        try:
            prediction = self.correction.corrected(latent, level, self._angle, prediction, any(calls), scale)
        except Exception as error:
            log.warning("DeepCache corrects nothing from here on: %s", one_line(error))
            self.stop_correcting()
            return prediction
        if self.correction.is_over:
            self.stop_correcting()
        return prediction

    def prediction_in(self, given: torch.Tensor) -> torch.Tensor:
        """As `Correction.prediction_in`."""
        return given if self.correction is None else self.correction.prediction_in(given)

    def stop_correcting(self) -> None:
        """Correct nothing from here on."""
        self.correction = None
        if self.target is not None:
            self.target.stop_correcting()

    def add_noise(self, carries: tuple[float, float], split: Any) -> None:
        """Note, before any step was skipped, that the sampler adds noise after all: the next step is full, since what
        was stored is of another split."""
        self.carries, self.split, self.adds_noise = carries, split, True
        self.stop_correcting()
        self._forget()
        self._parts.clear()
        self._step = self._key = None
        self.set_schedule(self.schedule)

    def run_in_full(self, reason: str) -> None:
        """Skip nothing from now on; the first reason is logged."""
        if not self.failed:
            log.warning("DeepCache: %s; every step runs in full.", reason)
            self.why_full = reason
        self.failed = True

    def begin_evaluation(self, sigma: float) -> None:
        """Note that the sampler asks for a prediction at `sigma`; the first one of a step decides for all of it.

        Without a schedule of at least one step, the calls until the next evaluation are plain.
        """
        self._occurrences.clear()
        self._calls.clear()
        if self._reuses:
            self._full[self._step], self._reuses = True, False
        if self.guidance is not None:
            self.guidance.is_asked = False
        if len(self.schedule) < 2:
            self._step = None
            return
        self._evaluations += 1
        before, self._level, self._angle = self._level, sigma, angle(sigma, self.is_flow)
        step = step_of(sigma, self.schedule)
        self._is_second = step == self._step and is_near(before, sigma) and self._could_reuse
        if self._is_second and self._may_reuse(step):
            self._full[step], self._reuses = False, True
        if self.target is not None and not self.failed and (self.guidance is not None or not self.adds_noise):
            self.target.note_reach(step, self._angle)
        if step != self._step:
            self._step = step
            if self._refresh is not None and step < self._refresh - LOOK_AHEAD:
                self._forget()  # a restarting sampler went back up: the features are from the future
            is_new = step not in self._full
            if is_new:
                self._began.append((step, time.perf_counter()))
                self._full[step] = self._must_refresh(step)
                self.is_probing = self._full[step] and self._probes(step)
            if self.is_probing:
                self._full[step] = False
            elif self._full[step]:
                self._start_cycle(step)
                if is_new and self.target is not None and self.guidance is None:
                    self.target.note_full(step)
            elif is_new and self.target is not None:
                self.target.note_skipped(step)
        for sibling in self._siblings.values():
            sibling.begin_evaluation(sigma)
            sibling.is_probing = self.is_probing

    @property
    def _is_free(self) -> bool:
        """Whether a skipped evaluation costs next to nothing."""
        has_more = self.has_other_nodes or (self.has_controls and self._takes_control)
        return self._shallow_share() == 0 and not has_more and not self._broken

    @property
    def _could_reuse(self) -> bool:
        """With samplers that add noise or extrapolate, the second evaluation counts for more than half a step."""
        is_halved = self.carries == PLAIN and not self.adds_noise
        return is_halved and self.target is not None and not self.failed and not self._siblings and self._is_free

    def _may_reuse(self, step: int) -> bool:
        is_possible = self._full[step] and in_window(self.schedule[step], self.window)
        return is_possible and self.target.may_reuse(step)

    def _probes(self, step: int) -> bool:
        if self.target is None or self.failed or self.guidance is not None:
            return False
        share = self._shallow_share()
        if not self.target.wants_probe(step, self._is_free) or not in_window(self.schedule[step + 1], self.window):
            return False
        return self._saved_steps() - share - self._broken >= -self.target.overhead()

    def probed(self, evaluate: Callable[[bool], tuple[Any, Any]], must_raise: Callable[[Exception], bool]) -> Any:
        """The result of the evaluation that was begun, where `is_probing`: it is made twice, first with the step
        skipped, and the two are compared. A probe that fails ends skipping for the rest of the run.

        evaluate: makes it, for True as the probe; returns its result and the prediction to compare. must_raise: tells
        the exceptions of a probe that are passed on.
        """
        step, forecast = self._step, None
        self.target.probes += 1
        self._compared.add(step)
        try:
            _, forecast = evaluate(True)
        except Exception as error:
            if must_raise(error):
                raise
            self.give_up(error)
        finally:
            self._full[step] = True
            self._occurrences.clear()
            skipped = self._calls
            for run in (self, *self._siblings.values()):
                run.is_probing = False
                run._start_cycle(step)
                run._calls = []
        result, truth = evaluate(False)
        self._conclude(step, skipped, self._calls, forecast, truth)
        return result

    def _conclude(self, step: int, skipped: Sequence[bool], full: Sequence[bool], forecast: Any, truth: Any) -> None:
        """Compare what `step` gave as a skipped and as a full one; of each, which of its calls were skipped."""
        # Another cache may have answered calls of either; then the difference says nothing.
        are_whole = bool(skipped) and all(skipped) and not any(full) and len(full) >= len(skipped)
        self._broken += not are_whole
        if are_whole and not self.failed and _is_alike(forecast, truth):
            self.target.compare(step, forecast, truth)
        self.target.note_full(step)

    def guided(
        self,
        shape: torch.Size,
        evaluate: Callable[[bool], Sequence[torch.Tensor]],
        must_raise: Callable[[Exception], bool],
    ) -> Sequence[torch.Tensor]:
        """The predictions of the denoised latent with and without the prompt, in a run with `guidance`.

        shape: of each. evaluate: makes both, for False only the first; where that fails, both are made from then on.
        must_raise: tells the exceptions that are passed on.
        """
        step, guidance = self._step, self.guidance
        if step is not None and guidance.is_asked:
            self.run_in_full("its predictions are made in parts, such as context windows")
        guidance.is_asked = True
        if step is None or self.failed:
            return evaluate(True)
        is_known = guidance.fits(shape, self._angle)
        if not self._full[step] and is_known and not guidance.is_stronger:
            try:
                cond = evaluate(False)[0]
            except Exception as error:
                if must_raise(error):
                    raise
                self.give_up(error)
                return evaluate(True)
            self.count(skipped=True)
            return [cond, guidance.uncond(cond)]
        cond, uncond = evaluate(True)
        # A sampler's later evaluations of a step are at the noise level of the next one.
        if not guidance.is_of(step):
            if is_known:
                truth, forecast = (guidance.guided(cond, other) for other in (uncond, guidance.uncond(cond)))
                self.target.note_feature(step, (forecast - truth).square().mean(dtype=torch.float32))
                self.target.compare(step, forecast, truth)
            self.target.note_full(step)
            guidance.record(step, self._angle, cond, uncond)
        return [cond, uncond]

    def tried(self, call: Callable[[], Any]) -> Any:
        """What `call`, one of the evaluation that was begun, gives as a skipped one, where `is_probing`; None where it
        fails, which ends skipping. Then it is made once more `in_full`; `end_probe` follows the last call. For hosts
        that cannot repeat an evaluation, as `probed` does."""
        try:
            return call()
        except Exception as error:
            self.give_up(error)
            return None

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """Within it, calls of an evaluation that `is_probing` are full ones."""
        self.is_probing, self._full[self._step] = False, True
        try:
            yield
        finally:
            self.is_probing, self._full[self._step] = True, False

    def end_probe(self, forecast: torch.Tensor | None, truth: torch.Tensor | None) -> None:
        """The evaluation that `is_probing` is over; both predictions of the denoised latent, None where unknown."""
        step = self._step
        self.target.probes += 1
        self._compared.add(step)
        self.is_probing, self._full[step] = False, True
        self._start_cycle(step)
        skipped, self._calls = self._calls[::2], self._calls[1::2]
        self._conclude(step, skipped, self._calls, forecast, truth)

    def give_up(self, error: Exception) -> None:
        """Skip nothing from now on, since a skipped call failed."""
        self.failed = True
        if not self.has_skipped:
            self.why_full = f"a skipped step failed ({one_line(error)})"
        log.warning("DeepCache: a skipped step failed (%s); the rest of this run is computed in full.", error)
        log.debug("DeepCache: where it failed", exc_info=True)

    def _must_refresh(self, step: int) -> bool:
        self._recall()
        if self.settings.is_off or self._refresh is None or not in_window(self.schedule[step], self.window):
            return True
        if self.guidance is not None and (step == len(self.schedule) - 2 or not self.guidance.is_known(self._angle)):
            # The last step too: samplers that correct a step by the next one's prediction divide its error by the noise
            # level.
            return True
        start, end = (angle(sigma, self.is_flow) for sigma in self.schedule[step : step + 2])
        scale = LATENT_DRIFT if self.split is not None and self.split.depth == 0 else 1.0
        try:
            return self.policy.should_refresh(Step(step, step - self._refresh, start, end, scale), self._drift)
        except Exception as error:
            self.run_in_full(f"whether to skip a step cannot be judged ({one_line(error)})")
            return True

    def _recall(self) -> None:
        """Take what earlier runs of this model learnt; not of the guidance, whose errors are seen whole."""
        can_learn = self.target is not None and self.learnt is not None and self.guidance is None
        if can_learn and self.split is not None and self._key is None:
            self._key = key_of(self.split.model, self.split.layout, self.carries, self.guided_by)
            self.target.sensitivity = self.learnt.of(self._key)

    def _start_cycle(self, step: int) -> None:
        """`step` is full: drop what later steps cannot use."""
        last = step if self._refresh is None else min(self._refresh, step)
        self._refresh = step
        # A quality compares what was held with what is computed.
        least = step if self.settings.between == "hold" and self.target is None else last
        self._histories = {key: known for key, known in self._histories.items() if known.newest >= least}
        self._drift.forget(before=last)

    def _forget(self) -> None:
        self._histories.clear()
        self._drift.forget()
        self._full.clear()
        self._refresh = None
        if self.guidance is not None:
            self.guidance.forget()
        if self.target is not None:
            self.target.restart()

    def branches(
        self, x: torch.Tensor, uuids: Sequence[Hashable], cond_indices: Sequence[int], variant: Hashable
    ) -> list[BranchKey] | None:
        """One key for each chunk of the batch `x` [len(uuids) * B, C, ...]; None when the call must be plain.

        To be called once for each model call.
        """
        chunks = len(uuids or ())
        if self.failed or self._step is None or not chunks or len(cond_indices) != chunks or x.shape[0] % chunks:
            return None
        if self.guidance is not None:
            if self._full[self._step]:
                self.guidance.note_call(x.numel() // chunks, cond_indices)
            return None
        shape = (x.shape[0] // chunks, *x.shape[1:])
        keys = []
        for uuid, cond_index in zip(uuids, cond_indices, strict=True):
            first = BranchKey(uuid, cond_index, variant, shape, x.dtype, x.device, 0)
            before = self._occurrences[first]
            keys.append(replace(first, occurrence=before) if before else first)
            self._occurrences[first] = before + 1
        return keys

    def _has_all(self, key: BranchKey) -> bool:
        """Whether every part that this run ever exchanged is there for the branch, from the last full step on."""
        known = [self._histories.get((key, part)) for part in self._parts]
        return bool(known) and all(history is not None and history.newest >= self._refresh for history in known)

    def can_skip(self, keys: Sequence[BranchKey]) -> bool:
        """Whether the current step is skipped and every branch of the call has its features."""
        return not self._full[self._step] and all(self._has_all(key) for key in keys)

    def gather(self, keys: Sequence[BranchKey], part: Hashable = 0) -> torch.Tensor:
        """The branches' features for the current evaluation as one batch, in memory of its own."""
        features = [self._histories[key, part].value(self._angle) for key in keys]
        return torch.cat(features) if len(features) > 1 else features[0]

    def exchange(
        self, keys: Sequence[BranchKey], feature: torch.Tensor, part: Hashable = 0, owned: bool = False
    ) -> torch.Tensor:
        """Store each branch's chunk of `feature` [len(keys) * B, ...], and return what the model goes on with.

        On a full step that is `feature` itself. Between full steps, where some branches of a joined batch had no
        feature, the others go on with theirs, as they would in a call of their own.

        part: which of the split's features this is. owned: nobody writes to `feature` any more, so it need not be
        copied. Where that fails, as for lack of memory, nothing is skipped any more.
        """
        if self.failed:
            return feature
        try:
            return self._exchanged(keys, feature, part, owned)
        except Exception as error:
            self.cannot_keep(error)
            return feature

    def cannot_keep(self, error: Exception) -> None:
        """Note that a feature could not be stored, as for lack of memory: nothing is skipped any more."""
        log.debug("DeepCache: why a feature could not be kept", exc_info=error)
        self._histories.clear()
        self._drift.forget()
        self.run_in_full(f"a feature could not be kept ({one_line(error)})")

    def _exchanged(self, keys: Sequence[BranchKey], feature: torch.Tensor, part: Hashable, owned: bool) -> torch.Tensor:
        self._parts.add(part)
        if not isinstance(feature, torch.Tensor) or feature.shape[0] % len(keys):
            return feature
        chunks = list(feature.chunk(len(keys)))
        histories = [self._histories.get((key, part)) for key in keys]
        is_known = [
            not self._full[self._step] and self._has_all(key) and history is not None and history.fits(chunk)
            for key, history, chunk in zip(keys, histories, chunks, strict=True)
        ]
        # A chunk of a shared tensor keeps all of it in memory.
        owned = owned and not any(is_known)
        for index, (key, history) in enumerate(zip(keys, histories, strict=True)):
            if is_known[index]:
                chunks[index] = history.value(self._angle)
                continue
            if history is None:
                history = self._histories[key, part] = History(ORDER + 1 if self.settings.between == "forecast" else 1)
            elif (note := self._noted_by(history)) is not None:
                error = history.error(self._angle, chunks[index], key.shape[0])
                if error is not None:
                    note(self._step, error)
            history.record(self._step, self._angle, chunks[index], owned)
        return torch.cat(chunks) if any(is_known) else feature

    def _noted_by(self, history: History) -> Callable[[int, torch.Tensor], None] | None:
        """Where to note the error of what `history` gives for the current evaluation; None where it says nothing."""
        if self.target is None or not self._full[self._step]:
            return None
        if history.newest != self._step:
            return self.target.note_feature
        return self.target.note_reuse if self._is_second else None

    def measure(self, keys: Sequence[BranchKey], shallow: torch.Tensor, owned: bool = False) -> None:
        """Measure the drift of `shallow` [len(keys) * B, ...], which the deep part is computed from: a feature, or the
        latent where all of the model is deep.

        To be called on full and skipped calls alike, before `exchange`. Does nothing where the policy does not use
        drift. owned: nobody writes to `shallow` any more, so it need not be copied.
        """
        if not self.policy.uses_drift or not isinstance(shallow, torch.Tensor) or shallow.shape[0] % len(keys):
            return
        try:
            for key, chunk in zip(keys, shallow.chunk(len(keys)), strict=True):
                renew = self._full[self._step] or not self._has_all(key)
                self._drift.measure(key, chunk, self._step, renew, owned and self._full[self._step])
        except Exception as error:
            self.cannot_keep(error)

    @property
    def _takes_control(self) -> bool:
        return self.split is None or self.split.takes_control

    @property
    def leaves_controls_out(self) -> bool:
        """Whether the current evaluation's calls, as far as they can be skipped, read nothing that ControlNets give."""
        is_skipped = self._step is not None and not self.failed and not self._full[self._step]
        return is_skipped and self.guidance is None and not self._takes_control

    @property
    def angle(self) -> float:
        """The current evaluation's noise level (`step_schedule.angle`)."""
        return self._angle

    @property
    def is_full(self) -> bool:
        """Whether the current step is computed in full."""
        return self._step is not None and self._full[self._step]

    def count(self, skipped: bool) -> None:
        """Count a finished model call, but none of a probe; a step with one skipped call is a skipped step."""
        self._calls.append(skipped)
        if self._reuses and skipped:
            self._halves.add(self._step)
        elif self._step is not None and not self.is_probing:
            self._skipped[self._step] = self._skipped.get(self._step, False) or skipped

    @property
    def full_steps(self) -> int:
        return len(self._skipped) - self.skipped_steps - len(self._halves)

    @property
    def skipped_steps(self) -> int:
        return sum(self._skipped.values())

    @property
    def has_skipped(self) -> bool:
        """Whether any step was skipped, or half skipped."""
        return bool(self.skipped_steps or self._halves)

    def quality_facts(self) -> dict[str, Any]:
        """Facts reported of a run with a quality target; before `close`."""
        if self.target is None:
            return {}
        steps = len(self._skipped)
        estimated = self.target.estimated_db() if self.has_skipped else None
        return {
            "target_db": self.target.target,
            "estimated_db": estimated if estimated is not None and math.isfinite(estimated) else None,
            "probes": self.target.probes,
            "skipped_work": self._saved_steps() / steps if steps else 0.0,
            "plan": self.plan,
        }

    def log_quality(self, facts: dict[str, Any]) -> bool:
        """Log what a quality target came to, if there is one and it skipped anything; whether that was said."""
        if self.target is None or not self.has_skipped:
            return False
        log.info(
            "DeepCache: %g dB asked, about %.0f reached by estimate; %d of %d steps were computed in full%s, %.0f %% "
            "of the work was skipped.",
            facts["target_db"],
            facts["estimated_db"] or math.inf,
            self.full_steps,
            len(self._skipped),
            f", {len(self._halves)} half skipped" if self._halves else "",
            100 * facts["skipped_work"],
        )
        return True

    @property
    def plan(self) -> list[tuple[str, float, float | None]]:
        """Each step of a run with a quality target, in the order in which they came: FULL, HALF, SKIPPED or COMPARED
        (where it is not HALF), its noise level, and the final latent's PSNR in dB by estimate if it is skipped; None
        where that was not asked."""
        rows = []
        for (step, _), letter in zip(self._counted, self.letters, strict=True):
            letter = COMPARED if letter == FULL and step in self._compared else letter
            error = self.target.estimates.get(step, 0.0)
            decibels = round(-20 * math.log10(error), 1) if 0 < error < math.inf else None
            rows.append((letter, float(f"{self.schedule[step]:.3g}"), decibels))
        return rows

    def _saved_steps(self) -> float:
        """The work that was saved, in full steps, less what comparing cost: of a step's evaluations it repeats one."""
        evaluation = len(self._began) / max(self._evaluations, 1)
        saved = self.skipped_steps + len(self._halves) * evaluation
        return saved * (1 - self._shallow_share()) - self.target.probes * evaluation * self._shallow_share()

    def _shallow_share(self) -> float:
        if self.guidance is not None:
            return 1 - self.guidance.share
        return 0.0 if self.split is None else self.split.shallow_share

    @property
    def letters(self) -> str:
        """FULL, HALF or SKIPPED for each step, in the order in which they came."""
        steps = [step for step, _ in self._counted]
        return "".join(SKIPPED if self._skipped.get(step) else HALF if step in self._halves else FULL for step in steps)

    @property
    def began(self) -> tuple[float, ...]:
        """The start of each of these steps, in seconds of `time.perf_counter`."""
        return tuple(moment for _, moment in self._counted)

    @property
    def _counted(self) -> list[tuple[int, float]]:
        """The steps that made a call of the model to its end: not the one that failed, nor what another cache took."""
        return [(step, moment) for step, moment in self._began if step in self._skipped or step in self._halves]

    def close(self) -> None:
        """Drop all tensors and the models."""
        for sibling in self._siblings.values():
            sibling.close()
        self._siblings.clear()
        self._forget()
        if self.target is not None:
            self.target.close()
        self._parts.clear()
        self._step = self.split = self.correction = self.sampler = None
        if self._key is not None:
            self.learnt.add(self._key, self.target.lessons)


def _is_alike(one: Any, other: Any) -> bool:
    is_tensor = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return is_tensor and one.shape == other.shape and one.ndim > 1
