"""DeepCache: which step recomputes the deep features, and which stream owns which of them.

Neighbouring sampler steps have nearly equal deep features (Ma, Fang, Wang: "DeepCache", CVPR 2024,
arXiv 2312.00858). Now and then a step runs in full and remembers the feature that the deep part of
the model hands to the shallow part; the steps between run the shallow part alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..report.savings import FULL, SKIPPED
from .drift import ChangeMeter
from .forecast import ORDER, History
from .step_schedule import angle, in_window, stake, step_of

SCHEDULES = ("uniform", "adaptive")
BETWEEN = ("hold", "forecast")

LOOK_AHEAD = 2
"""Steps that a sampler may evaluate ahead of the one that it is at; heunpp2 does."""


@dataclass(frozen=True)
class DeepCacheSettings:
    """How often and how a run (the sampling of one image or batch) skips.

    `DeepCacheSettings(interval=3)` lets the features decide: of 20 to 40 steps it skips about half, of the 4 to 8 steps
    of a distilled model none or next to none.

    interval: sampler steps from one full step to the next, at most; 1 switches caching off, more is
        faster and less exact.
    depth: how much of the model still runs on a skipped step, counted in skips of a UNet, from the outermost,
        and in blocks at either end of a transformer; None (or 0) is chosen by the model, more is
        slower and more exact.
    start_percent, end_percent: the part of sampling, as fractions of the noise schedule, in which
        steps are skipped; outside it every step is full, and so it is everywhere when they are equal.
    schedule: "uniform" refreshes every `interval` steps; "adaptive" as soon as the change of the shallow
        features since the last refresh, as expected for the coming step, puts more than `threshold` at
        stake there, and after `interval` steps at the latest.
    threshold: relative L1 change times `stake` of the step; 0 makes every step full, more is faster and
        less exact.
    between: what a skipped step uses: "hold" the feature of the last full step, "forecast" what the
        last full steps let expect.

    Raises ValueError, with the valid range, for anything else.
    """

    interval: int = 3
    depth: int | None = None
    start_percent: float = 0.0
    end_percent: float = 1.0
    schedule: str = "adaptive"
    threshold: float = 0.05
    between: str = "forecast"

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"DeepCache: interval {self.interval} is below 1 (1 switches it off).")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"DeepCache: depth {self.depth} is below 0 (0 chooses by itself).")
        for name in ("start_percent", "end_percent"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"DeepCache: {name} {getattr(self, name)} is outside 0.0 to 1.0.")
        if self.start_percent > self.end_percent:
            raise ValueError(
                f"DeepCache: start_percent {self.start_percent} is above end_percent {self.end_percent}; "
                f"it must be 0.0 to {self.end_percent}."
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"DeepCache: schedule is {self.schedule!r}; it must be one of: {', '.join(SCHEDULES)}.")
        if not 0.0 <= self.threshold < math.inf:
            raise ValueError(f"DeepCache: threshold {self.threshold} is outside 0.0 and up (0 skips nothing).")
        if self.between not in BETWEEN:
            raise ValueError(f"DeepCache: between is {self.between!r}; it must be one of: {', '.join(BETWEEN)}.")
        if self.depth == 0:
            object.__setattr__(self, "depth", None)

    @property
    def is_off(self) -> bool:
        """Whether every step of every run is full."""
        return self.interval == 1 or self.start_percent == self.end_percent

    @property
    def is_adaptive(self) -> bool:
        return self.schedule == "adaptive"


@dataclass(frozen=True)
class StreamKey:
    """Everything that tells one sequence of model inputs from every other one in a run.

    uuid and cond_index: the conditioning and the list it is in (core gives an area's copy in the
    negative list the uuid of the positive one). circumstances: frame indices of a context window, and
    which blocks a patch replaces (guidance that asks the model again with parts of it left out, as PAG and
    skip-layer guidance do). occurrence: how often the same came before within one evaluation. shape: one
    chunk of the latent, [B, C, ...].
    """

    uuid: Hashable
    cond_index: int
    circumstances: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    occurrence: int


class DeepCacheRun:
    """What one sampler run remembers; made at its start, closed at its end.

    A step is full or not for all streams alike. A stream without a feature of the present cycle (new
    in mid-run, or skipped by somebody else's cache) recomputes.

    Memory, for each stream (two with cond and uncond) and part of the boundary: one copy of the deep
    feature, with "forecast" `forecast.ORDER` + 1; with "adaptive" one of the shallow feature besides.
    SD1.5 at 1024² in half precision and default depth: 10 MiB a copy and image.
    """

    def __init__(self, settings: DeepCacheSettings):
        self.settings = settings
        self.boundary: Any = None
        """Where the run's model is cut; the host's to set, dropped at the end."""
        self.schedule: tuple[float, ...] = ()
        """Noise levels of the run, one more than it has steps; empty until its first evaluation."""
        self.window: tuple[float, float] = (math.inf, 0.0)
        """Noise levels, highest and lowest, of the steps that may be skipped."""
        self.is_flow = False
        """Whether noise levels are shares of noise, 0 to 1, and not its ratio to the picture."""
        self.failed = False
        """True once a skipped call raised: the rest of the run is computed in full."""
        self._step: int | None = None
        self._angle = 0.0
        """Of the present evaluation's noise level."""
        self._refresh: int | None = None
        """The step that was computed in full last."""
        self._full: dict[int, bool] = {}
        """What was decided; samplers that look ahead come back to a step."""
        self._histories: dict[tuple[StreamKey, Hashable], History] = {}
        self._parts: set[Hashable] = set()
        self._meter = ChangeMeter()
        self._occurrences: Counter[StreamKey] = Counter()
        self._skipped: dict[int, bool] = {}
        self._began: list[tuple[int, float]] = []
        """Steps in the order in which they came, with the moment; seconds of `time.perf_counter`."""

    def begin_evaluation(self, sigma: float) -> None:
        """The sampler asks for a prediction at `sigma`; the first one of a step decides for all of it.

        Without a schedule of one step at least, the calls until the next evaluation are plain.
        """
        self._occurrences.clear()
        if len(self.schedule) < 2:
            self._step = None
            return
        self._angle = angle(sigma, self.is_flow)
        step = step_of(sigma, self.schedule)
        if step != self._step:
            self._step = step
            self._began.append((step, time.perf_counter()))
            if self._refresh is not None and step < self._refresh - LOOK_AHEAD:
                self._forget()  # back up, as restarting samplers go: what is remembered is the future
            if step not in self._full:
                self._full[step] = self._must_refresh(step)
            if self._full[step]:
                self._start_cycle(step)

    def _must_refresh(self, step: int) -> bool:
        settings = self.settings
        if settings.is_off or self._refresh is None or not in_window(self.schedule[step], self.window):
            return True
        if step - self._refresh >= settings.interval:
            return True
        if not settings.is_adaptive:
            return False
        expected = self._meter.predicted(step)
        now, then = (angle(sigma, self.is_flow) for sigma in self.schedule[step : step + 2])
        # Turned round, so that what is not a number refreshes.
        return expected is None or not expected * stake(now, then) <= settings.threshold

    def _start_cycle(self, step: int) -> None:
        """`step` is full: drop what the steps from here on cannot use."""
        last = step if self._refresh is None else min(self._refresh, step)
        self._refresh = step
        if self.settings.between == "hold":
            self._histories.clear()
        else:
            self._histories = {key: known for key, known in self._histories.items() if known.newest >= last}
        self._meter.forget(before=last)

    def _forget(self) -> None:
        self._histories.clear()
        self._meter.forget()
        self._full.clear()
        self._refresh = None

    def streams(
        self, x: torch.Tensor, uuids: Sequence[Hashable], cond_indices: Sequence[int], circumstances: Hashable
    ) -> list[StreamKey] | None:
        """One key for each chunk of the batch `x` [len(uuids) * B, C, ...], to be asked for once a
        call; None when the call must be plain."""
        chunks = len(uuids or ())
        if self.failed or self._step is None or not chunks or len(cond_indices) != chunks or x.shape[0] % chunks:
            return None
        shape = (x.shape[0] // chunks, *x.shape[1:])
        keys = []
        for uuid, cond_index in zip(uuids, cond_indices, strict=True):
            first = StreamKey(uuid, cond_index, circumstances, shape, x.dtype, x.device, 0)
            before = self._occurrences[first]
            keys.append(replace(first, occurrence=before) if before else first)
            self._occurrences[first] = before + 1
        return keys

    def _has_all(self, key: StreamKey) -> bool:
        """Whether every part that a boundary of this run ever exchanged is there, from the present cycle."""
        known = [self._histories.get((key, part)) for part in self._parts]
        return bool(known) and all(history is not None and history.newest >= self._refresh for history in known)

    def can_skip(self, keys: Sequence[StreamKey]) -> bool:
        """Whether this is a step to skip and every stream of the call has its features."""
        return not self._full[self._step] and all(self._has_all(key) for key in keys)

    def gather(self, keys: Sequence[StreamKey], part: Hashable = 0) -> torch.Tensor:
        """The streams' features for the present evaluation as one batch; nobody else's memory, since
        what follows may work in place."""
        features = [self._histories[key, part].value(self._angle) for key in keys]
        return torch.cat(features) if len(features) > 1 else features[0]

    def exchange(self, keys: Sequence[StreamKey], feature: torch.Tensor, part: Hashable = 0) -> torch.Tensor:
        """Remember a copy of each stream's share of `feature` [len(keys) * B, ...], and return what the model
        goes on with.

        part: which of a boundary's features this is. On a full step that is `feature` itself. Between
        full steps (some streams of a joined batch had none) streams that have one go on with it, as they
        would in a call of their own.
        """
        self._parts.add(part)
        if not isinstance(feature, torch.Tensor) or feature.shape[0] % len(keys):
            return feature
        chunks = list(feature.chunk(len(keys)))
        held = [not self._full[self._step] and self._has_all(key) for key in keys]
        for index, key in enumerate(keys):
            history = self._histories.get((key, part))
            if held[index] and history is not None and history.fits(chunks[index]):
                chunks[index] = history.value(self._angle)
                continue
            held[index] = False
            if history is None:
                history = self._histories[key, part] = History(ORDER + 1 if self.settings.between == "forecast" else 1)
            history.record(self._step, self._angle, chunks[index])
        return torch.cat(chunks) if any(held) else feature

    def watch(self, keys: Sequence[StreamKey], shallow: torch.Tensor) -> None:
        """`shallow` [len(keys) * B, ...] is what the deep part is computed from; on full and skipped calls
        alike, before `exchange`. Only the adaptive schedule looks at it."""
        if not self.settings.is_adaptive or not isinstance(shallow, torch.Tensor) or shallow.shape[0] % len(keys):
            return
        for key, chunk in zip(keys, shallow.chunk(len(keys)), strict=True):
            self._meter.watch(key, chunk, self._step, renew=self._full[self._step] or not self._has_all(key))

    @property
    def is_full(self) -> bool:
        """Whether the present step is computed in full, for all streams alike."""
        return self._step is not None and self._full[self._step]

    def count(self, skipped: bool) -> None:
        """A model call of the present step is done; a step with one skipped call is a skipped step."""
        if self._step is not None:
            self._skipped[self._step] = self._skipped.get(self._step, False) or skipped

    @property
    def full_steps(self) -> int:
        return len(self._skipped) - self.skipped_steps

    @property
    def skipped_steps(self) -> int:
        return sum(self._skipped.values())

    @property
    def letters(self) -> str:
        """A letter for each step as they came: F where it was computed in full, S where a part was skipped."""
        return "".join(SKIPPED if self._skipped.get(step) else FULL for step, _ in self._began)

    @property
    def began(self) -> tuple[float, ...]:
        """When each of these steps began, in seconds of `time.perf_counter`."""
        return tuple(moment for _, moment in self._began)

    def close(self) -> None:
        """Drop all tensors and the model."""
        self._forget()
        self._parts.clear()
        self._step = self.boundary = None
