"""DeepCache: which step recomputes the deep features, and which stream owns which of them.

Neighbouring sampler steps have nearly equal deep features (Ma, Fang, Wang: "DeepCache", CVPR 2024,
arXiv 2312.00858). Every `interval`-th step runs in full and remembers the feature that the deep
part of the model hands to the shallow part; the steps between run the shallow part alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .unet_boundary import UNetBoundary

SIGMA_TOLERANCE = 1e-4
"""Relative; samplers compute their sigmas anew in float32, and neighbours differ by 5e-3 or more."""


@dataclass(frozen=True)
class DeepCacheSettings:
    """interval: sampler steps from one full step to the next; 1 switches caching off, more is faster
    and less exact. depth: how many of the model's input blocks still run on a skipped step; None (or
    0) is chosen by the model, more is slower and more exact.

    Raises ValueError outside interval >= 1, depth >= 0.
    """

    interval: int = 3
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"DeepCache: interval {self.interval} is below 1 (1 switches it off).")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"DeepCache: depth {self.depth} is below 0 (0 chooses by itself).")
        if self.depth == 0:
            object.__setattr__(self, "depth", None)


def step_of(sigma: float, schedule: Sequence[float]) -> int:
    """The index of the step that an evaluation at `sigma` belongs to.

    `schedule` holds the noise levels of a run, one more than it has steps, falling (or rising, when
    noise is added). Step i owns the levels from schedule[i] up to, but without, schedule[i + 1], so
    the midpoints of second-order samplers are in the step that they refine; Heun's second evaluation,
    at the next step's own level, shares the decision of that next step.
    """
    starts = schedule[:-1]
    if schedule[0] >= schedule[-1]:
        passed = bisect_right([-start for start in starts], -sigma * (1 - SIGMA_TOLERANCE))
    else:
        passed = bisect_right(starts, sigma * (1 + SIGMA_TOLERANCE))
    return min(max(passed - 1, 0), len(starts) - 1)


def refresh_of(step: int, interval: int) -> int:
    """The full step whose features serve `step`; `step` runs in full when it is its own."""
    return step - step % interval


@dataclass(frozen=True)
class StreamKey:
    """Everything that tells one sequence of model inputs from every other one in a run.

    uuid and cond_index: the conditioning and the list it is in (core gives an area's copy in the
    negative list the uuid of the positive one). window: frame indices of a context window. occurrence:
    how often the same came before within one evaluation (guidance that asks the model twice, as PAG
    and SAG do). shape: one chunk of the latent, [B, C, ...].
    """

    uuid: Hashable
    cond_index: int
    window: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    occurrence: int


class DeepCacheRun:
    """What one sampler run remembers; made at its start, closed at its end.

    Features live from one full step to the next. A stream without one (new in mid-run, or skipped by
    somebody else's cache) recomputes.
    """

    def __init__(self, settings: DeepCacheSettings):
        self.settings = settings
        self.boundary: UNetBoundary | None = None
        self.schedule: tuple[float, ...] = ()
        """Noise levels of the run, one more than it has steps; empty until its first evaluation."""
        self.failed = False
        """True once a skipped call raised: the rest of the run is computed in full."""
        self._step: int | None = None
        self._refresh: int | None = None
        self._features: dict[StreamKey, torch.Tensor] = {}
        self._occurrences: Counter[StreamKey] = Counter()
        self._skipped: dict[int, bool] = {}

    def begin_evaluation(self, sigma: float) -> None:
        """The sampler asks for a prediction at `sigma`; without a schedule of one step at least, the
        calls until the next evaluation are plain."""
        self._occurrences.clear()
        if len(self.schedule) < 2:
            self._step = None
            return
        self._step = step_of(sigma, self.schedule)
        refresh = refresh_of(self._step, self.settings.interval)
        if refresh != self._refresh:
            self._features.clear()
            self._refresh = refresh

    def streams(
        self, x: torch.Tensor, uuids: Sequence[Hashable], cond_indices: Sequence[int], window: Hashable
    ) -> list[StreamKey] | None:
        """One key for each chunk of the batch `x` [len(uuids) * B, C, ...], to be asked for once a
        call; None when the call must be plain."""
        chunks = len(uuids or ())
        if self.failed or self._step is None or not chunks or len(cond_indices) != chunks or x.shape[0] % chunks:
            return None
        shape = (x.shape[0] // chunks, *x.shape[1:])
        keys = []
        for uuid, cond_index in zip(uuids, cond_indices, strict=True):
            first = StreamKey(uuid, cond_index, window, shape, x.dtype, x.device, 0)
            keys.append(StreamKey(uuid, cond_index, window, shape, x.dtype, x.device, self._occurrences[first]))
            self._occurrences[first] += 1
        return keys

    def can_skip(self, keys: Sequence[StreamKey]) -> bool:
        """Whether this is a step to skip and every stream of the call has a feature."""
        return self._step != self._refresh and all(key in self._features for key in keys)

    def gather(self, keys: Sequence[StreamKey]) -> torch.Tensor:
        """The streams' features as one batch; a copy, since what follows may work in place."""
        features = [self._features[key] for key in keys]
        return torch.cat(features) if len(features) > 1 else features[0].clone()

    def exchange(self, keys: Sequence[StreamKey], feature: torch.Tensor) -> torch.Tensor:
        """Remember a copy of each stream's part of `feature`, and return what the model goes on with.

        On a full step that is `feature` itself. Between full steps (some streams of a joined batch
        had none) streams that have one go on with it, as they would in a call of their own.
        """
        if not isinstance(feature, torch.Tensor) or feature.shape[0] % len(keys):
            return feature
        held = set() if self._step == self._refresh else self._features.keys() & set(keys)
        for key, chunk in zip(keys, feature.chunk(len(keys)), strict=True):
            if key not in held:
                self._features[key] = chunk.clone()
        return self.gather(keys) if held else feature

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

    def close(self) -> None:
        """Drop all tensors and the model."""
        self._features.clear()
        self._step = self._refresh = self.boundary = None
